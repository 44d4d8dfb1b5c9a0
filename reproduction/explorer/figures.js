// What each chart shows of a setting.
const figures = (() => {
  "use strict";
  const { range, short, spread } = charts, { epsilonText, percent, whole } = words;
  const CLIENTS = { min: 1, max: 1e7, log: true, label: "clients in a round, M" };
  const ROUNDS = { min: 1, max: 1e4, log: true, label: "rounds, T" };
  const SHARE = { min: 0, max: 1, log: false, format: (v) => `${Math.round(100 * v)}%`, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] };
  // What is drawn: a loss of up to so many times the best; with zoom, an accuracy of up to so many points below it too.
  const SHOWN_LOSS = 2, ZOOMED_LOSS = 1.15, ZOOMED_POINTS = 12;

  const near = (points, x) => points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);

  // Recorded results of one problem. What is too bad to be drawn is named instead, as losses above twice the best are on the suite's page.
  function accuracy(problem, slots, yours, zoom) {
    const all = problem.contenders.flatMap((one) => one.points.filter((p) => p.mean !== null).map((p) => p.mean));
    const top = problem.higher_is_better ? Infinity : (zoom ? ZOOMED_LOSS : SHOWN_LOSS) * Math.min(...all);
    const bottom = problem.higher_is_better && zoom ? Math.max(...all) - ZOOMED_POINTS : -Infinity;
    const left = [], series = [];
    problem.contenders.forEach((one, number) => {
      const kept = one.points.filter((p) => p.mean !== null && p.mean <= top && p.mean >= bottom);
      for (const p of one.points) if (!kept.includes(p)) left.push(`${one.label} at ε = ${p.epsilon} (${p.mean === null ? "diverged" : value(problem, p.mean)})`);
      series.push({
        name: one.label, slot: `s${slots[one.color]}`, points: kept.map((p) => [p.epsilon, p.mean]), errors: kept.map((p) => p.error || 0),
        dots: true, dashed: one.server_rates > 0, shift: 4 * (number - (problem.contenders.length - 1) / 2), tuned: one.server_rates,
      });
    });
    const stops = [...new Set(problem.contenders.flatMap((one) => one.points.map((p) => p.epsilon)))].sort((a, b) => a - b);
    const ends = series.flatMap((one) => one.points.flatMap(([, y], i) => [y - one.errors[i], y + one.errors[i]])).map((y) => Math.min(Math.max(y, bottom), top));
    const x = { min: stops[0] / 1.35, max: stops[stops.length - 1] * 1.35, log: true, label: "ε (replace-one, δ = 10⁻⁵)", ticks: stops, format: String };
    return {
      title: `${problem.name}: ${problem.higher_is_better ? "accuracy" : "loss"} against ε`, left, series, stops, x,
      y: { ...range(ends, false), label: problem.higher_is_better ? "test accuracy in %" : "test loss, lower is better", format: (v) => String(v) },
      rules: yours >= x.min && yours <= x.max ? [{ x: yours, text: "your noise" }] : [],
      tell: (epsilon) => [`ε = ${epsilon}`, ...problem.contenders.flatMap((one) => one.points.filter((p) => p.epsilon === epsilon).map((p) =>
        [`s${slots[one.color]}`, `${one.label}: ${cell(problem, p)}`]))],
    };
  }

  const value = (problem, x) => problem.higher_is_better ? x.toFixed(2) : x < 100 ? x.toFixed(4) : short(x, 2);
  function cell(problem, p) {
    if (p.mean === null) return "diverged";
    const error = p.seeds > 1 && p.error !== null ? ` ± ${value(problem, p.error)}` : "";
    return `${value(problem, p.mean)}${error}${p.server_rate === null ? "" : ` [${p.server_rate}]`}`;
  }

  function cohort(s, r) {
    const xs = spread(CLIENTS), sizes = [s.dimension / 100, s.dimension, s.dimension * 100].filter((d) => d >= 1);
    const at = (clients, dimension) => {
      const changed = { ...s, clients, dimension }, again = s.mode === "epsilon" && s.step === "paper";
      return accountant.noiseShare(changed, again ? accountant.noise(changed, s.epsilon) : r.z);
    };
    const series = sizes.map((d) => ({ name: `${d === s.dimension ? "your " : ""}d = ${d < 1e6 ? whole(d) : short(d)}`, slot: d === s.dimension ? "s0" : d < s.dimension ? "s2" : "s1", dashed: d !== s.dimension, points: xs.map((x) => [x, at(x, d)]) }));
    return {
      title: "Noise in the mean of a round over the clip, against clients", series, x: CLIENTS, mark: [s.clients, r.share], stops: xs,
      y: { ...range([...series.flatMap((one) => one.points.map((p) => p[1])), 1], true, 0.02), label: "length of the noise / clip" },
      rules: [{ y: 1, text: "as long as the clip" }],
      tell: (x) => [`${short(x)} clients`, ...series.map((one) => [one.slot, `${one.name}: ${short(near(one.points, x)[1])} × clip`])],
    };
  }

  const VERDICTS = [["clear", "s2"], ["noisy rounds", "s5"], ["mostly noise", "s4"], ["no signal", "s6"]];

  // Regions of the verdict over clients and parameters at this z and T. Their borders are powers of M.
  function map(s, r, limits) {
    const y = { min: 1, max: 1e10, log: true, label: "parameters, d" }, xs = spread(CLIENTS);
    const strength = (clients) => (s.who === "local" ? clients : clients * clients) / (r.z * r.z);
    const borders = [
      (m) => strength(m), (m) => s.rounds * strength(m),
      (m) => Math.max(s.rounds * strength(m), (s.rounds * strength(m) / limits.deviations) ** 2 / 2), () => 1e40,
    ].map((border) => (m) => Math.min(Math.max(border(m), 1e-3), 1e14));
    const regions = VERDICTS.map(([name, slot], i) => {
      const below = i === 0 ? () => 1e-3 : borders[i - 1];
      return { name, slot, points: [...xs.map((m) => [m, borders[i](m)]), ...[...xs].reverse().map((m) => [m, below(m)])] };
    });
    return {
      title: `Map of clients and parameters; this setting is: ${r.verdict}`, regions, x: CLIENTS, y, mark: [s.clients, s.dimension], stops: xs, series: [],
      tell: (m) => [`${short(m)} clients`, ...VERDICTS.slice(0, 3).map(([name, slot], i) => [slot, `${name} up to d = ${short(Math.min(1e14, Math.max(1, borders[i](m))), 2)}`])],
    };
  }

  function spending(s, r) {
    const xs = spread(ROUNDS, 61), points = xs.map((t) => [t, accountant.epsilon(accountant.totalMu({ ...s, rounds: t }, r.z), s.delta)]).filter((p) => p[1] > 0);
    const shown = points.length ? points : [[ROUNDS.min, 1e-3], [ROUNDS.max, 1e-3]];
    return {
      title: "ε against rounds at this noise", x: ROUNDS, stops: shown.map((p) => p[0]), mark: r.epsilon > 0 ? [s.rounds, r.epsilon] : undefined,
      series: points.length ? [{ name: `z = ${short(r.z)}`, slot: "s0", points }] : [],
      y: { ...range(shown.map((p) => p[1]), true, 0.02), label: "ε of all rounds together" },
      tell: (t) => [`${short(t)} rounds`, ["s0", `ε = ${epsilonText(near(shown, t)[1])}`]],
    };
  }

  function saving(s, r) {
    const xs = spread(ROUNDS, 61), shares = xs.map((t) => {
      const changed = { ...s, rounds: t };
      return accountant.noiseShare(changed, accountant.noise(changed, r.epsilon));
    });
    const series = [
      { name: "one round", slot: "s0", points: xs.map((t, i) => [t, shares[i]]) },
      { name: "all rounds together", slot: "s1", dashed: true, points: xs.map((t, i) => [t, shares[i] / Math.sqrt(t)]) },
    ];
    return {
      title: "Noise over signal against rounds at this ε", x: ROUNDS, stops: xs, series, mark: [s.rounds, r.share],
      y: { ...range([...series.flatMap((one) => one.points.map((p) => p[1])), 1], true, 0.02), label: "least noise / signal" },
      rules: [{ y: 1, text: "as much noise as signal" }],
      tell: (t) => [`${short(t)} rounds`, ...series.map((one) => [one.slot, `${one.name}: ${short(near(one.points, t)[1])}`])],
    };
  }

  function tradeoff(s, r) {
    const inner = spread({ min: -6, max: 6 }, 97).map((t) => [accountant.normal(t - r.mu / 2), accountant.normal(t + r.mu / 2)]);
    const points = [[0, 0], ...inner, [1, 1]], hits = accountant.hits(r.mu, s.alarms);
    return {
      title: "The exact trade-off between hits and false alarms", x: { ...SHARE, label: "false alarms" }, y: { ...SHARE, label: "hits" },
      series: [{ name: "the best attack", slot: "s1", points }, { name: "guessing", slot: "s6", dashed: true, points: [[0, 0], [1, 1]] }],
      mark: [s.alarms, hits], stops: [0.001, 0.01, ...spread({ min: 0.02, max: 0.98 }, 49)],
      tell: (alarms) => [`${percent(alarms)} false alarms`, ["s1", `hits: ${percent(accountant.hits(r.mu, alarms))}`], ["s6", `guessing: ${percent(alarms)}`]],
    };
  }

  function belief(s, r) {
    const hits = accountant.hits(r.mu, s.alarms), after = (p, yes, no) => p * yes / (p * yes + (1 - p) * no || 1);
    const x = { min: 1e-6, max: 1, log: true, label: "how likely the guess was before", ticks: [1e-6, 1e-5, 1e-4, 0.001, 0.01, 0.1, 1], format: (v) => v < 0.001 ? short(v) : `${100 * v}%` };
    const xs = [...spread({ ...x, max: 0.9 }, 101), 0.92, 0.94, 0.96, 0.98, 0.99];
    const series = [
      { name: "after an alarm", slot: "s1", points: xs.map((p) => [p, after(p, hits, s.alarms)]) },
      { name: "after none", slot: "s0", points: xs.map((p) => [p, after(p, 1 - hits, 1 - s.alarms)]) },
      { name: "before", slot: "s6", dashed: true, points: xs.map((p) => [p, p]) },
    ];
    return {
      title: "How sure the attacker is after the test, against before", x, y: { ...SHARE, label: "after the test" },
      series, mark: [s.prior, after(s.prior, hits, s.alarms)], stops: xs,
      tell: (p) => [`${percent(p)} before`, ...series.slice(0, 2).map((one) => [one.slot, `${one.name}: ${percent(near(one.points, p)[1])}`])],
    };
  }

  return { accuracy, cell, cohort, map, spending, saving, tradeoff, belief, VERDICTS };
})();
