// Small charts: lines, error bars, regions and marks on linear or logarithmic axes, drawn at the width that they have.
const charts = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

  function node(name, attributes = {}, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  const power = (exponent) => `10${[...String(exponent)].map((sign) => RAISED[sign]).join("")}`;

  // Three significant digits, powers of ten where there would be many zeros.
  function short(value, digits = 3) {
    if (value === Infinity) return "∞";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) {
      const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
      const front = String(Number(mantissa));
      return front === "1" ? power(Number(exponent)) : `${front}·${power(Number(exponent))}`;
    }
    const rounded = Number(value.toPrecision(digits));
    return size >= 1000 ? rounded.toLocaleString("en") : String(rounded);
  }

  function ticks({ min, max, log }, room) {
    if (log) {
      const first = Math.ceil(Math.log10(min) - 1e-9), last = Math.floor(Math.log10(max) + 1e-9);
      if (last - first < 2) {
        const found = [];
        for (let k = first - 1; k <= last; k++) for (const m of [1, 2, 5]) found.push(m * 10 ** k);
        const inside = found.filter((t) => t >= min * 0.999 && t <= max * 1.001);
        if (inside.length >= 3) return inside;
        if (max / min < 20) return ticks({ min, max }, room);
      }
      const every = Math.max(1, Math.ceil((last - first + 1) / room));
      return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every));
    }
    const rough = (max - min) / room, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= rough * 0.7);
    const found = [];
    for (let i = Math.ceil(min / step - 1e-9); i * step <= max + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  function scale({ min, max, log }, from, to) {
    const of = log ? Math.log : (v) => v, low = of(min), high = of(max);
    return (value) => from + (of(value) - low) / (high - low) * (to - from);
  }

  // A range that holds the values, with a little air.
  function range(values, log, air = 0.06) {
    const shown = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let low = Math.min(...shown), high = Math.max(...shown);
    if (log) {
      const pad = Math.max(1.15, (high / low) ** air);
      return { min: low / pad, max: high * pad, log };
    }
    const pad = (high - low || Math.abs(high) || 1) * air;
    return { min: low - pad, max: high + pad, log };
  }

  // An axis is {min, max, log, label, ticks?, format?}. Series: {name, slot, points: [[x, y], …], errors?, dots?, dashed?, shift?}; regions:
  // {name, slot, points}; rules: {x or y, text}; mark: [x, y]. `tell(x)` gives the lines of the value box, `stops` where arrow keys go.
  // `room` is the host's width: asked for here, it would make the browser lay out the page once for every chart.
  function draw(host, spec, room) {
    let svg = host.firstChild;
    if (!svg) {
      svg = node("svg", { class: "plot", tabindex: "0", role: "img" });
      host.append(svg);
      listen(svg);
    }
    const width = Math.max(260, room), height = Math.round(Math.min(340, Math.max(240, width * 0.62)));
    const yTicks = spec.y.ticks || ticks(spec.y, 6), format = spec.y.format || short;
    const longest = Math.max(...yTicks.map((t) => format(t).length));
    const box = { left: 30 + 7.2 * longest, right: width - 22, top: 12, bottom: height - 44 };
    const x = scale(spec.x, box.left, box.right), y = scale(spec.y, box.bottom, box.top);
    const parts = [];
    for (const t of yTicks) {
      parts.push(node("line", { class: "grid", x1: box.left, x2: box.right, y1: y(t), y2: y(t) }));
      parts.push(node("text", { class: "tick", x: box.left - 7, y: y(t) + 4, "text-anchor": "end" }, format(t)));
    }
    for (const t of spec.x.ticks || ticks(spec.x, Math.max(3, Math.floor((box.right - box.left) / 62)))) {
      parts.push(node("line", { class: "grid", x1: x(t), x2: x(t), y1: box.top, y2: box.bottom }));
      parts.push(node("text", { class: "tick", x: x(t), y: box.bottom + 17, "text-anchor": "middle" }, (spec.x.format || short)(t)));
    }
    const clip = `clip-${host.dataset.chart}`, frame = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
    const clipPath = node("clipPath", { id: clip });
    clipPath.append(node("rect", frame));
    const inside = node("g", { "clip-path": `url(#${clip})` });
    const at = ([px, py]) => `${x(px).toFixed(1)},${Math.max(-4000, Math.min(4000, y(py))).toFixed(1)}`;
    for (const region of spec.regions || []) {
      inside.append(node("polygon", { class: `region ${region.slot}`, points: region.points.map(at).join(" ") }));
    }
    for (const rule of spec.rules || []) {
      const across = rule.y !== undefined;
      inside.append(node("line", across
        ? { class: "rule", x1: box.left, x2: box.right, y1: y(rule.y), y2: y(rule.y) }
        : { class: "rule", x1: x(rule.x), x2: x(rule.x), y1: box.top, y2: box.bottom }));
    }
    for (const one of spec.series || []) inside.append(line(one, x, y, at));
    if (spec.mark) inside.append(node("circle", { class: "here", cx: x(spec.mark[0]), cy: y(spec.mark[1]), r: 6 }));
    parts.push(clipPath, inside, ...(spec.rules || []).filter((rule) => rule.text).map((rule) => label(rule, box, x, y)));
    parts.push(node("rect", { class: "axis", ...frame }));
    parts.push(node("text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label));
    const middle = (box.top + box.bottom) / 2;
    parts.push(node("text", { class: "label", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, spec.y.label));
    parts.push(node("line", { class: "guide", y1: box.top, y2: box.bottom }));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${spec.title}. Arrow keys read values.`);
    svg.replaceChildren(...parts);
    svg.spec = { ...spec, toX: x, box };
  }

  function line({ slot, points, errors, dots, dashed, shift = 0 }, x, y, at) {
    const group = node("g", { class: `series ${slot}${dashed ? " dashed" : ""}`, transform: `translate(${shift} 0)` });
    group.append(node("polyline", { points: points.map(at).join(" ") }));
    if (dots) for (const [px, py] of points) group.append(node("circle", { cx: x(px), cy: y(py), r: 3.4 }));
    (errors || []).forEach((error, i) => {
      const [px, py] = points[i], middle = x(px), low = y(py - error), high = y(py + error);
      group.append(node("path", { class: "error", d: `M${middle},${low}V${high}M${middle - 3.5},${low}h7M${middle - 3.5},${high}h7` }));
    });
    return group;
  }

  function label(rule, box, x, y) {
    if (rule.y !== undefined) return node("text", { class: "rule-text", x: box.right - 5, y: y(rule.y) - 6, "text-anchor": "end" }, rule.text);
    const right = x(rule.x) > (box.left + box.right) / 2;
    return node("text", { class: "rule-text", x: x(rule.x) + (right ? -6 : 6), y: box.top + 15, "text-anchor": right ? "end" : "start" }, rule.text);
  }

  const tip = () => document.getElementById("tip");

  function listen(svg) {
    let stop = 0;
    const hide = () => { tip().hidden = true; svg.querySelector(".guide").style.visibility = "hidden"; };
    const show = (value, pixel) => {
      const { tell, toX } = svg.spec, guide = svg.querySelector(".guide"), [title, ...rows] = tell(value, pixel);
      guide.setAttribute("x1", toX(value));
      guide.setAttribute("x2", toX(value));
      guide.style.visibility = "visible";
      const head = document.createElement("b");
      head.textContent = title;
      tip().replaceChildren(head, ...rows.map(([slot, text]) => {
        const row = document.createElement("div"), dot = document.createElement("i"), words = document.createElement("span");
        row.className = slot;
        words.textContent = text;
        row.append(dot, words);
        return row;
      }));
      tip().hidden = false;
      const box = svg.getBoundingClientRect(), at = box.left + toX(value) * box.width / svg.viewBox.baseVal.width;
      const room = document.documentElement.clientWidth, width = tip().offsetWidth, height = tip().offsetHeight;
      const left = at + 14 + width < room ? at + 14 : at - 14 - width;
      tip().style.left = `${Math.max(6, Math.min(left, room - width - 6))}px`;
      tip().style.top = `${Math.max(6, Math.min(box.top + 10, innerHeight - height - 6))}px`;
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect(), { stops, toX } = svg.spec;
      const pixel = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      stop = stops.reduce((best, value, i) => Math.abs(toX(value) - pixel) < Math.abs(toX(stops[best]) - pixel) ? i : best, 0);
      show(stops[stop]);
    };
    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!by) return;
      event.preventDefault();
      stop = Math.max(0, Math.min(svg.spec.stops.length - 1, stop + by));
      show(svg.spec.stops[stop]);
    });
  }

  // `count` values from low to high, evenly spaced on the axis.
  const spread = ({ min, max, log }, count = 81) => Array.from({ length: count }, (_, i) => {
    const share = i / (count - 1);
    return log ? min * (max / min) ** share : min + (max - min) * share;
  });

  return { draw, range, short, spread };
})();
