// The page: settings in the address, controls that change them, and everything that is said and drawn of them.
(() => {
  "use strict";
  const { suite, slots, limits } = JSON.parse(document.getElementById("data").textContent);
  const { short } = charts, form = document.getElementById("controls");
  const find = (selector) => document.querySelector(selector);
  const RANGES = {
    epsilon: { min: 0.01, max: 1000, usual: 8 }, z: { min: 0.05, max: 10000, usual: 5 }, rounds: { min: 1, max: 10000, usual: 50, whole: true },
    clients: { min: 1, max: 1e7, usual: 1000, whole: true }, dimension: { min: 1, max: 1e10, usual: 5046, whole: true },
    delta: { min: 1e-15, max: 0.1, usual: 1e-5 }, clip: { min: 1e-4, max: 1000, usual: 1 },
    alarms: { min: 1e-5, max: 0.5, usual: 0.01 }, prior: { min: 1e-6, max: 0.5, usual: 0.01 },
  };
  const CHOICES = {
    mode: ["epsilon", "noise"], who: ["central", "local"], adjacency: ["replace-one", "add-remove"], step: ["free", "paper"],
    problem: suite.problems.map((problem) => problem.name), zoom: ["no", "yes"],
  };
  const usual = () => ({
    ...Object.fromEntries(Object.entries(RANGES).map(([name, { usual: value }]) => [name, value])),
    ...Object.fromEntries(Object.entries(CHOICES).map(([name, [first]]) => [name, first])),
  });
  let setting = read();

  // A value as typed, or null: a number within its range, whole where it counts something.
  function number(name, text) {
    const { min, max, whole } = RANGES[name], value = Number(String(text).replaceAll(",", "").trim());
    if (String(text).trim() === "" || !Number.isFinite(value)) return null;
    const inside = Math.min(max, Math.max(min, value));
    return whole ? Math.round(inside) : inside;
  }

  function read() {
    const given = new URLSearchParams(location.hash.slice(1)), made = usual();
    for (const name of Object.keys(RANGES)) if (given.has(name)) made[name] = number(name, given.get(name)) ?? made[name];
    for (const [name, values] of Object.entries(CHOICES)) if (values.includes(given.get(name))) made[name] = given.get(name);
    return made;
  }

  // Only what differs from the usual; of ε and z the one that is chosen.
  function address() {
    const plain = usual(), unused = setting.mode === "noise" ? "epsilon" : "z";
    const changed = Object.entries(setting).filter(([name, value]) => name !== unused && value !== plain[name]);
    return changed.length ? `#${new URLSearchParams(changed.map(([name, value]) => [name, String(value)]))}` : "#";
  }

  const toSlider = (name, value) => {
    const { min, max } = RANGES[name];
    return Math.round(1000 * Math.log(value / min) / Math.log(max / min));
  };
  const fromSlider = (name, position) => {
    const { min, max, whole } = RANGES[name], value = min * (max / min) ** (position / 1000);
    return whole ? Math.max(1, Math.round(Number(value.toPrecision(3)))) : Number(value.toPrecision(3));
  };

  function change(changes) {
    setting = { ...setting, ...changes };
    show();
    try { history.replaceState(null, "", address()); } catch { /* browsers limit how often an address may change; the next one counts */ }
  }

  const holders = [...document.querySelectorAll(".control[data-name]")];
  for (const holder of holders) {
    const name = holder.dataset.name, exact = holder.querySelector(".exact"), slider = holder.querySelector("[type=range]");
    slider.addEventListener("input", () => change({ [name]: fromSlider(name, Number(slider.value)) }));
    exact.addEventListener("change", () => { change({ [name]: number(name, exact.value) ?? setting[name] }); });
  }
  for (const name of ["who", "adjacency", "step", "problem"]) {
    const select = document.getElementById(name);
    if (name === "problem") for (const { name: value } of suite.problems) select.append(new Option(value, value));
    select.addEventListener("change", () => change({ [name]: select.value }));
  }
  const zoom = document.getElementById("zoom");
  zoom.addEventListener("change", () => change({ zoom: zoom.checked ? "yes" : "no" }));
  for (const radio of form.querySelectorAll("[name=mode]")) {
    radio.addEventListener("change", () => {
      const { z, epsilon } = words.derive(setting, limits), mode = radio.value;
      // The other slider takes over where this one stood.
      change(mode === "noise" ? { mode, z: number("z", z.toPrecision(6)) } : { mode, epsilon: number("epsilon", epsilon.toPrecision(6)) });
    });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset").addEventListener("click", () => change(usual()));
  document.getElementById("bar").addEventListener("click", () => {
    form.scrollIntoView({ block: "start" });
    form.querySelector("input:checked").focus({ preventScroll: true });
  });
  document.getElementById("link").addEventListener("click", async ({ target }) => {
    try {
      await navigator.clipboard.writeText(location.href);
      target.textContent = "Copied";
    } catch {
      target.textContent = "Copy it from the address bar";
    }
    setTimeout(() => { target.textContent = "Copy link to this setting"; }, 1800);
  });

  function showControls() {
    for (const holder of holders) {
      const name = holder.dataset.name, value = setting[name], exact = holder.querySelector(".exact"), slider = holder.querySelector("[type=range]");
      exact.value = value >= 1e-3 && value < 1e7 ? String(value) : value.toExponential().replace("e+", "e");
      slider.value = toSlider(name, value);
      slider.setAttribute("aria-valuetext", short(value));
    }
    find('[data-name="epsilon"]').hidden = setting.mode === "noise";
    find('[data-name="z"]').hidden = setting.mode !== "noise";
    form.querySelector(`[name=mode][value=${setting.mode}]`).checked = true;
    for (const name of ["who", "adjacency", "step", "problem"]) document.getElementById(name).value = setting[name];
    zoom.checked = setting.zoom === "yes";
    const adjacency = document.getElementById("adjacency");
    adjacency.disabled = setting.who === "local";
    if (adjacency.disabled) adjacency.value = "replace-one";
  }

  const say = (name, text) => { find(`[data-say="${name}"]`).textContent = text; };
  const fact = (name, text, value) => {
    for (const element of document.querySelectorAll(`[data-fact="${name}"]`)) { element.textContent = text; element.dataset.value = value; }
  };
  function cells(tag, texts, classes = () => "") {
    return texts.map((text, i) => {
      const made = document.createElement(tag === "td" && i === 0 ? "th" : tag);
      made.textContent = text;
      made.className = i > 0 ? `num ${classes(i)}`.trim() : "";
      made.scope = tag === "td" && i === 0 ? "row" : "col";
      return made;
    });
  }
  function row(...made) {
    const line = document.createElement("tr");
    line.append(...made);
    return line;
  }
  function legend(name, entries) {
    find(`[data-legend="${name}"]`).replaceChildren(...entries.map(({ slot, name: text, dashed, area }) => {
      const item = document.createElement("li"), swatch = document.createElement("i"), words_ = document.createElement("span");
      item.className = slot;
      swatch.className = area ? "area" : dashed ? "dashed" : "";
      words_.textContent = text;
      item.append(swatch, words_);
      return item;
    }));
  }

  function showPromise(r) {
    fact("epsilon", words.epsilonText(r.epsilon), r.epsilon);
    fact("epsilonRound", words.epsilonText(r.epsilonRound), r.epsilonRound);
    fact("z", short(r.z), r.z);
    fact("share", `${short(r.share)}\u202f× clip`, r.share);
    say("promise", words.promise(setting, r));
    say("command", words.command(setting, r));
    find('[data-list="warnings"]').replaceChildren(...words.warnings(setting, r, limits).map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
    find("#readers tbody").replaceChildren(...words.readers(setting, r).map(([who, mu, epsilon]) =>
      row(...cells("td", [who, mu === null ? "–" : short(mu, 4), epsilon === null ? "–" : words.epsilonText(epsilon)]))));
  }

  function showAccuracy(r, draw) {
    const problem = suite.problems.find(({ name }) => name === setting.problem);
    const central = setting.who === "central";
    const yours = central ? accountant.epsilon(accountant.totalMu({ ...setting, adjacency: suite.adjacency }, r.z), suite.delta) : null;
    const spec = figures.accuracy(problem, slots, yours, setting.zoom === "yes");
    draw("accuracy", spec);
    legend("accuracy", spec.series.map((one) => ({ ...one, name: one.tuned ? `${one.name} (best of ${one.tuned} server rates, chosen on test data)` : one.name })));
    say("problem", `${problem.summary}. ${problem.natural ? "Its clients are natural: tested on clients who took no part." : "Its clients are dealt out or made up."}`);
    say("accuracyCaption", "Mean over seeds, bars of one standard error; points of one ε are set a little apart." +
      (spec.left.length ? ` Not drawn, because they are too far from the best: ${spec.left.join("; ")}.` : ""));
    const nearest = spec.stops.reduce((best, e) => Math.abs(Math.log(e / yours)) < Math.abs(Math.log(best / yours)) ? e : best);
    const at = central && yours > 0 ? nearest : 8;
    const seen = problem.contenders.flatMap((one) => one.points.filter((p) => p.epsilon === at).map((p) => `${one.label} ${figures.cell(problem, p)}`));
    const where = !central ? "These runs have central noise, so that your local setting is not on this axis." : yours < spec.x.min || yours > spec.x.max
      ? `Your noise costs ε = ${words.epsilonText(yours)} as these runs count it (replace-one, δ = 10⁻⁵), which is outside what was run.`
      : `Your noise costs ε = ${words.epsilonText(yours)} as these runs count it (replace-one, δ = 10⁻⁵).`;
    say("accuracy", `${where} Recorded at ε = ${at}: ${seen.join("; ")}. A number in brackets is the server rate that was best on the test data.`);
    find("#values thead").replaceChildren(row(...cells("th", ["", ...spec.stops.map((e) => `ε = ${e}`)])));
    find("#values tbody").replaceChildren(...problem.contenders.map((one) => row(...cells("td", [one.label, ...spec.stops.map((e) => {
      const point = one.points.find((p) => p.epsilon === e);
      return point ? figures.cell(problem, point) : "–";
    })]))));
  }

  const hosts = Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((host) => [host.dataset.chart, host]));

  function show() {
    const r = words.derive(setting, limits);
    const rooms = Object.fromEntries(Object.entries(hosts).map(([name, host]) => [name, host.clientWidth]));
    const draw = (name, spec) => charts.draw(hosts[name], spec, rooms[name]);
    showControls();
    showPromise(r);
    showAccuracy(r, draw);
    for (const name of ["noise", "rounds", "attacker"]) say(name, words[name](setting, r));
    const specs = {
      cohort: figures.cohort(setting, r), map: figures.map(setting, r, limits), spending: figures.spending(setting, r),
      tradeoff: figures.tradeoff(setting, r), belief: figures.belief(setting, r), ...(r.epsilon > 0 ? { saving: figures.saving(setting, r) } : {}),
    };
    for (const [name, spec] of Object.entries(specs)) draw(name, spec);
    for (const name of ["cohort", "saving", "tradeoff", "belief"]) if (specs[name]) legend(name, specs[name].series);
    legend("map", figures.VERDICTS.map(([name, slot]) => ({ name, slot, area: true })));
    const local = setting.who === "local" ? "z√d/√M" : "z√d/M";
    say("cohortCaption", `The noise is ${local} clips long, at z = ${short(r.z)}. The dot is your setting.`);
    say("mapCaption", `At z = ${short(r.z)} and T = ${short(setting.rounds)}. Your setting, the dot, is: ${r.verdict}. The borders are those of dpfedexp plan.`);
    say("spendingCaption", `At z = ${short(r.z)} and δ = ${short(setting.delta)}: ε grows like √T while it is small and like T when it is large.`);
    say("savingCaption", r.epsilon > 0 ? `At ε = ${words.epsilonText(r.epsilon)}: the noise of each round grows like √T, and over all rounds it averages out.` : "ε is 0 here: no noise is too much for that.");
    say("tradeoffCaption", "Exact: with μ the shift of all rounds, hits = Φ(Φ⁻¹(false alarms) + μ). The dot is at the false alarms that you chose.");
    say("beliefCaption", `With ${words.percent(setting.alarms)} false alarms. The dot is at the likelihood that you chose.`);
  }

  addEventListener("hashchange", () => { setting = read(); show(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; show(); } });
  show();
})();
