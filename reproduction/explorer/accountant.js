// Exact Gaussian differential privacy, as in accounting/gdp.py, accounting/joint.py and accounting/events/charges.py.
const accountant = (() => {
  "use strict";
  const SQRT2 = Math.SQRT2, SQRT_PI = Math.sqrt(Math.PI);

  // Rational approximations of the error function on three ranges: W. J. Cody, Mathematics of Computation 23 (1969) 631–637.
  const NEAR = [
    [1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3],
    [1, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3],
  ];
  const MIDDLE = [
    [2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
      8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3],
    [1, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3, 3.29079923573345963e3,
      4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3],
  ];
  const FAR = [
    [1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1, 1.60837851487422766e-2,
      6.58749161529837803e-4],
    [1, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3],
  ];
  const horner = (coefficients, x) => coefficients.reduce((sum, coefficient) => sum * x + coefficient, 0);
  const ratio = ([above, below], x) => horner(above, x) / horner(below, x);

  // e^{x²}·erfc(x) for x ≥ 0: neither under- nor overflows.
  function erfcx(x) {
    if (x <= 0.46875) return Math.exp(x * x) * (1 - x * ratio(NEAR, x * x));
    if (x <= 4) return ratio(MIDDLE, x);
    const inverse = 1 / (x * x);
    return (1 / SQRT_PI - inverse * ratio(FAR, inverse)) / x;
  }

  const density = (x) => Math.exp(-x * x / 2);
  const tail = (x) => 0.5 * density(x) * erfcx(x / SQRT2);
  const normal = (x) => x < 0 ? tail(-x) : 1 - tail(x);

  // log δ(ε) at a = μ/2 − ε/μ.
  function logDeltaAt(a, mu) {
    const far = erfcx((mu - a) / SQRT2);
    if (a > 0) return Math.log(Math.max(normal(a) - 0.5 * density(a) * far, 5e-324));
    return -a * a / 2 - Math.LN2 + Math.log(Math.max(erfcx(-a / SQRT2) - far, 5e-324));
  }

  // Where an increasing function crosses 0, to the last bit that halving an interval can tell.
  function crossing(rises, low, high) {
    for (let step = 0; step < 2000; step++) {
      const middle = low + (high - low) / 2;
      if (middle <= low || middle >= high) break;
      if (rises(middle) < 0) low = middle; else high = middle;
    }
    return high;
  }

  // The largest (hits − false alarms) of any test between neighbors: 2Φ(μ/2) − 1.
  function advantage(mu) {
    const x = mu / (2 * SQRT2);
    return x <= 0.46875 ? x * ratio(NEAR, x * x) : 1 - Math.exp(-x * x) * erfcx(x);
  }

  function epsilon(mu, delta) {
    if (mu === 0 || delta >= 1) return 0;
    if (mu === Infinity || delta <= 0) return Infinity;
    if (delta >= advantage(mu)) return 0;
    const target = Math.log(delta);
    // δ(ε) ≤ Φ(a) ≤ exp(−a²/2) for a ≤ 0 bounds a below, ε ≥ 0 above.
    const a = crossing((x) => logDeltaAt(x, mu) - target, -Math.sqrt(-2 * target), mu / 2);
    return Math.max(0, mu * (mu / 2 - a));
  }

  // The largest μ for which μ-GDP implies (ε, δ)-DP.
  function mu(epsilon, delta) {
    const target = Math.log(delta), excess = (m) => logDeltaAt(m / 2 - epsilon / m, m) - target;
    let low = 1, high = 1;
    while (excess(low) > 0) low /= 4;
    while (excess(high) < 0) high *= 4;
    return crossing(excess, low, high);
  }

  // The update and the paper's squared norms together under replace-one, with ρ = (C·σ_v/σ_s)²; σ_v = zC.
  function joint(z, rho) {
    if (rho <= (11 + 5 * Math.sqrt(5)) / 8) return 2 / z;
    const b = 1 / (rho * (1 + Math.sqrt(1 - 2 / rho)));
    return (1 + b) * Math.sqrt(1 + rho * (1 - b) ** 2) / z;
  }

  // μ of one round, everybody taking part. who: central or local; step: free, or paper for the squared norms as a query of their own.
  function roundMu({ who, adjacency, step, clients, dimension }, z) {
    if (who === "local") return 2 / z;
    if (step !== "paper") return (adjacency === "replace-one" ? 2 : 1) / z;
    const scalar = dimension * z * z / clients;
    return adjacency === "replace-one" ? joint(z, (z / scalar) ** 2) : Math.hypot(1 / z, 1 / scalar);
  }

  const totalMu = (setting, z) => roundMu(setting, z) * Math.sqrt(setting.rounds);

  // The noise multiplier with which all rounds cost ε.
  function noise(setting, epsilon) {
    const target = mu(epsilon, setting.delta);
    const excess = (logZ) => target - totalMu(setting, Math.exp(logZ));
    let low = 0, high = 0;
    while (excess(low) > 0) low -= 2;
    while (excess(high) < 0) high += 2;
    return Math.exp(crossing(excess, low, high));
  }

  // The norm of the noise in a round's mean over the clip: z√d/M, or z√d/√M where every client adds its own.
  const noiseShare = ({ who, clients, dimension }, z) => z * Math.sqrt(dimension) / (who === "local" ? Math.sqrt(clients) : clients);

  function quantile(p) {
    if (p > 0.5) return -quantile(1 - p);
    const target = Math.log(p);
    return crossing((x) => Math.log(tail(-x)) - target, -Math.sqrt(-2 * target), 0);
  }

  return {
    erfcx, normal, quantile, advantage, epsilon, mu, roundMu, totalMu, noise, noiseShare,
    // The most hits that a test can have with these false alarms.
    hits: (mu, alarms) => normal(quantile(alarms) + mu),
    // How often the best guess is right where the guessed thing holds with probability `prior`.
    right: (mu, prior) => {
      const shift = Math.log(prior / (1 - prior)) / mu;
      return prior * normal(mu / 2 + shift) + (1 - prior) * normal(mu / 2 - shift);
    },
  };
})();
