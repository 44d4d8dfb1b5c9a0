(() => {
  "use strict";
  const good = (value, log) => typeof value === "number" && (value > 0 || !log);
  const text = (value) => charts.short(value, 6);

  // What `charts.draw` needs of a panel; null where it has no values.
  function specOf({ title, x_label: xLabel, y_label: yLabel, log_x: logX, log_y: logY, series, slots }) {
    const lines = series.map(({ name, x, y, low, high, dashed }, number) => {
      const rows = x.map((at, i) => ({ x: at, y: y[i], low: low?.[i], high: high?.[i] })).filter((row) => good(row.x, logX) && good(row.y, logY));
      return { name, slot: `s${slots[number]}`, dashed, rows, points: rows.map((row) => [row.x, row.y]), dots: rows.length <= 12 };
    });
    const rows = lines.flatMap((line) => line.rows);
    if (!rows.length) return null;
    const stops = [...new Set(rows.map((row) => row.x))].sort((a, b) => a - b);
    const y = charts.range(rows.flatMap((row) => [row.y, row.low ?? row.y, row.high ?? row.y]), logY, 0.04);
    const banded = (row) => good(row.high, logY) && typeof row.low === "number";
    const regions = lines.map(({ slot, rows: all }) => ({ slot: `band ${slot}`, rows: all.filter(banded) })).filter((one) => one.rows.length).map((one) => ({
      slot: one.slot, points: [...one.rows.map((row) => [row.x, row.high]), ...one.rows.map((row) => [row.x, Math.max(row.low, y.min)]).reverse()],
    }));
    const value = (row) => charts.short(row.y, 4) + (banded(row) && row.low !== row.high ? ` (${charts.short(row.low, 4)} … ${charts.short(row.high, 4)})` : "");
    return {
      title: `${title}: ${yLabel} against ${xLabel} for ${lines.map((line) => line.name).join(", ")}`, series: lines, regions, stops,
      x: { ...charts.range(stops, logX, stops.length > 1 ? 0 : 0.5), label: xLabel, format: text }, y: { ...y, label: yLabel, format: text },
      tell: (at) => [`${xLabel} ${text(at)}`, ...lines.flatMap((line) => line.rows.filter((row) => row.x === at).map((row) => [line.slot, `${line.name}: ${value(row)}`]))],
    };
  }

  const hosts = [...document.querySelectorAll("[data-panel]")].map((host) => [host, specOf(JSON.parse(host.dataset.panel))]);
  function drawAll() {
    const rooms = hosts.map(([host]) => host.clientWidth);
    hosts.forEach(([host, spec], i) => spec ? charts.draw(host, spec, rooms[i]) : host.replaceChildren("No values."));
  }
  let drawnAt = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== drawnAt) { drawnAt = innerWidth; drawAll(); } });
  drawAll();

  const button = document.getElementById("theme"), root = document.documentElement;
  const themes = ["auto", "light", "dark"], names = { auto: "Auto", light: "Light", dark: "Dark" };
  const spoken = { auto: "automatic", light: "light", dark: "dark" };
  const keep = (name) => { try { localStorage.setItem("dpfedexp-theme", name); } catch { /* a page from a file may not keep anything */ } };
  const kept = () => { try { return localStorage.getItem("dpfedexp-theme"); } catch { return null; } };
  function apply(name) {
    if (name === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = name;
    button.dataset.mode = name;
    button.querySelector("span").textContent = names[name];
    button.setAttribute("aria-label", `Color scheme: ${spoken[name]}`);
  }
  apply(themes.includes(kept()) ? kept() : "auto");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(button.dataset.mode) + 1) % themes.length];
    keep(next);
    apply(next);
  });

  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      const code = copy.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        copy.textContent = "Selected";
      }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  }
})();
