(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function hide(svg) {
    tip.hidden = true;
    svg.querySelector(".guide").style.visibility = "hidden";
    svg.querySelector(".dots").replaceChildren();
  }

  function show(svg, data, index) {
    const guide = svg.querySelector(".guide"), dots = svg.querySelector(".dots"), x = data.x[index];
    guide.setAttribute("x1", x);
    guide.setAttribute("x2", x);
    guide.style.visibility = "visible";
    dots.replaceChildren();
    tip.replaceChildren(element("b", `${data.label} ${data.at[index]}`));
    for (const series of data.series) {
      const value = series.values[index];
      if (!value) continue;
      const dot = document.createElementNS(SVG, "circle");
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", value[0]);
      dot.setAttribute("r", 4);
      dot.setAttribute("class", `s${series.slot}`);
      dots.append(dot);
      const row = element("div", "", `s${series.slot}`);
      row.append(element("i"), element("span", `${series.name}: ${value[1]}`));
      tip.append(row);
    }
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = box.left + x * scale, width = tip.offsetWidth, height = tip.offsetHeight, room = document.documentElement.clientWidth;
    const left = at + 14 + width < room ? at + 14 : at - 14 - width;
    tip.style.left = `${Math.max(6, Math.min(left, room - width - 6))}px`;
    tip.style.top = `${Math.max(6, box.top + 10 + height > innerHeight ? innerHeight - height - 6 : box.top + 10)}px`;
  }

  for (const svg of document.querySelectorAll("svg.chart")) {
    const data = JSON.parse(svg.dataset.hover);
    let index = data.x.length - 1;
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      index = data.x.reduce((best, at, i) => Math.abs(at - x) < Math.abs(data.x[best] - x) ? i : best, 0);
      show(svg, data, index);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => hide(svg));
    svg.addEventListener("blur", () => hide(svg));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide(svg);
      if (!step) return;
      event.preventDefault();
      index = Math.max(0, Math.min(data.x.length - 1, index + step));
      show(svg, data, index);
    });
  }

  const button = document.getElementById("theme"), root = document.documentElement;
  const themes = ["auto", "light", "dark"], names = { auto: "Auto", light: "Light", dark: "Dark" };
  const spoken = { auto: "automatic", light: "light", dark: "dark" };
  const keep = (name) => { try { localStorage.setItem("dpfedexp-theme", name); } catch { /* a page from a file may not keep anything */ } };
  const kept = () => { try { return localStorage.getItem("dpfedexp-theme"); } catch { return null; } };
  function apply(name) {
    if (name === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = name;
    button.dataset.mode = name;
    button.querySelector("span").textContent = names[name];
    button.setAttribute("aria-label", `Colour scheme: ${spoken[name]}`);
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
