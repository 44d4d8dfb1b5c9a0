// What a setting comes to, and the sentences that say it.
const words = (() => {
  "use strict";
  const { short } = charts, whole = (n) => Math.round(n).toLocaleString("en");
  const plain = (x) => x < 1e-3 ? x.toExponential() : String(x);

  const epsilonText = (e) => e >= 1e5 ? short(e) : e >= 1000 ? whole(e) : e >= 0.1 ? e.toFixed(2) : e === 0 ? "0" : short(e);
  // Never rounded to certainty: 99.99% where it is nearly 100%.
  function percent(share) {
    const p = 100 * share;
    if (p <= 0) return "0%";
    if (p > 99) return 100 - p < 1e-6 ? "more than 99.999999%" : `${p.toFixed(Math.min(6, Math.max(1, Math.ceil(-Math.log10(100 - p)) + 1)))}%`;
    return p < 0.1 ? `${short(p, 2)}%` : `${Number(p.toFixed(1))}%`;
  }
  const times = (x) => `${short(x, 2)}\u202f×`;

  function verdict(share, best, dimension, deviations) {
    if (best < 1) return best ** 2 * Math.sqrt(dimension / 2) >= deviations ? "mostly noise" : "no signal";
    return share > 1 ? "noisy rounds" : "clear";
  }

  // Everything that follows from a setting.
  function derive(setting, limits) {
    const z = setting.mode === "noise" ? setting.z : accountant.noise(setting, setting.epsilon);
    const mu = accountant.totalMu(setting, z), share = accountant.noiseShare(setting, z), best = Math.sqrt(setting.rounds) / share;
    return {
      z, mu, share, best,
      epsilon: setting.mode === "noise" ? accountant.epsilon(mu, setting.delta) : setting.epsilon,
      epsilonRound: accountant.epsilon(accountant.roundMu(setting, z), setting.delta),
      verdict: verdict(share, best, setting.dimension, limits.deviations),
    };
  }

  const hidden = ({ adjacency, who }) => adjacency === "add-remove" && who === "central" ? "add-remove" : "replace-one";

  function promise(s, r) {
    const observer = s.who === "local" ? "every message of a client, as the server does" : "every model and step size that is released";
    const either = hidden(s) === "add-remove" ? "with a client as without it" : "with one client’s data as with any other data in their place";
    const rounds = s.rounds === 1 ? "After one round" : `After ${whole(s.rounds)} rounds`;
    return `${rounds}: ε = ${epsilonText(r.epsilon)} at δ = ${short(s.delta)}, exactly: no smaller ε holds at this δ. For whoever sees ${observer}, ` +
      `whatever comes out is at most e^ε${r.epsilon < 700 ? ` = ${short(Math.exp(r.epsilon), 2)}` : ""} times as likely ${either}, up to δ.`;
  }

  function warnings(s, r, limits) {
    const found = [], perClient = s.delta * s.clients;
    if (s.clients < limits.few_clients) found.push(`${whole(s.clients)} clients: client-level privacy can’t work here, because it hides all that a whole client has to say. Consider record-level privacy.`);
    if (perClient > 1) found.push(`δ is above 1/M = ${short(1 / s.clients, 2)}: it allows that one client’s data are published as they are. Take ${short(Math.min(1e-5, 0.1 / s.clients), 2)} or less.`);
    else if (perClient > 0.1 * (1 + 1e-9)) found.push(`δ is ${short(perClient, 2)}/M; it should be well below 1/M. Take ${short(Math.min(1e-5, 0.1 / s.clients), 2)} or less.`);
    if (r.epsilon > limits.large_epsilon) found.push(`ε above ${limits.large_epsilon} promises next to nothing: more clients pay for more noise, fewer rounds cost less.`);
    return found;
  }

  // Rows of [who, μ, ε], as the statement of a run gives them.
  function readers(s, r) {
    const row = (text, mu) => [text, mu, accountant.epsilon(mu, s.delta)];
    if (s.who === "central") {
      return ["replace-one", "add-remove"].map((adjacency) => row(
        adjacency === "replace-one" ? "what a client holds, from anyone who sees the models (replace-one)" : "that a client takes part, from anyone who sees the models (add-remove)",
        accountant.totalMu({ ...s, adjacency }, r.z)));
    }
    const alone = "what a client holds, from readers of the models alone, if the server helps nobody";
    return [
      row("what a client holds, from the server (replace-one)", r.mu),
      s.step === "paper" ? [`${alone}: nothing better is proven, because the step size uses every report’s own norm`, null, null] : row(alone, r.mu / Math.sqrt(s.clients)),
    ];
  }

  function command(s, r) {
    const z = String(Number(r.z.toPrecision(12)));
    if (s.who === "local") return `dpfedexp privacy epsilon --mechanism local-gaussian -z ${z} -T ${s.rounds} -M ${s.clients} --delta ${plain(s.delta)}`;
    if (s.step === "free") return `dpfedexp privacy epsilon -z ${z} -T ${s.rounds} --delta ${plain(s.delta)} --adjacency ${s.adjacency}`;
    return `compose([(central_gaussian(${z}, "${s.adjacency}", scalar_multiplier=${s.dimension} * ${z}**2 / ${s.clients}), ${s.rounds})], ${plain(s.delta)}).epsilon`;
  }

  function noise(s, r) {
    const spread = `In the mean of a round the noise is ${times(r.share)} the clip, ${short(r.share * s.clip, 2)} in length; the clip, ${short(s.clip)}, is the most that clients can say if all push the same way.`;
    const together = `Over all rounds the best that any data can give is ${times(r.best)} as much signal as noise.`;
    const enough = Math.max(1, Math.ceil(s.clients / r.best ** (s.who === "local" ? 2 : 1)));
    const needs = `As much signal as noise takes about ${short(enough, 2)} clients or a model of at most ${short(Math.max(1, Math.floor(s.dimension * r.best ** 2)), 2)} parameters at this z.`;
    const judged = {
      clear: "This is clear: even a single round can be more signal than noise.",
      "noisy rounds": "Single rounds are mostly noise and the run as a whole need not be: judge it by many rounds, not by one.",
      "mostly noise": `There will be more noise than signal. A model can bear that to a point, because noise goes in all ${short(s.dimension)} directions and a signal in few. ${needs}`,
      "no signal": `The noise hides the signal: even identical updates of all clients in every round could not be told from noise. ${needs}`,
    }[r.verdict];
    return `${spread} ${together} ${judged}`;
  }

  function rounds(s, r) {
    const with_ = (count) => ({ ...s, rounds: count });
    const more = accountant.epsilon(accountant.totalMu(with_(4 * s.rounds), r.z), s.delta);
    const needed = accountant.noise(with_(4 * s.rounds), r.epsilon);
    const saving = Number.isFinite(needed) ? ` At the same ε, they need z = ${short(needed)} instead of ${short(r.z)}: each round is ${times(needed / r.z)} as noisy, and four times as many rounds average it out again, so that all together have hardly less signal.` : "";
    return `Four times as many rounds (${whole(4 * s.rounds)}) with the same noise cost ε = ${epsilonText(more)} instead of ${epsilonText(r.epsilon)}.${r.epsilon > 0 ? saving : ""}`;
  }

  function attacker(s, r) {
    const hits = accountant.hits(r.mu, s.alarms), after = s.prior * hits / (s.prior * hits + (1 - s.prior) * s.alarms);
    const question = hidden(s) === "add-remove" ? "whether a client took part" : "which of two data sets a client holds";
    const sees = s.who === "local" ? "sees every message of the client" : "sees every release";
    return `The strongest attacker there can be knows everything about all other clients, ${sees} and guesses ${question}. With even odds before, it is right ` +
      `in ${percent(accountant.right(r.mu, 0.5))} of cases, where chance is 50%: the most by which its hits can exceed its false alarms is ${percent(accountant.advantage(r.mu))}. ` +
      `If it accepts ${percent(s.alarms)} false alarms, it finds ${percent(hits)} of the cases; a guess that was right with ${percent(s.prior)} before is right with ${percent(after)} after an alarm. ` +
      `These are limits for any attack; real ones know less.`;
  }

  return { derive, verdict, promise, warnings, readers, command, noise, rounds, attacker, epsilonText, percent, times, whole };
})();
