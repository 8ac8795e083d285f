// Make elements from plain data. Text stays text: what a model wrote is never parsed as HTML.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "onsubmit" || name === "onchange") made[name] = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return made;
}

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export function age(ms) {
  if (ms === null || ms === undefined) return "never";
  const s = Math.max(0, ms / 1000);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return `${number(count, unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
}

export function panel(title, note, ...content) {
  return el("section", { class: "panel" }, el("h2", {}, title, note ? el("small", {}, ` ${note}`) : null), ...content);
}

// A curve, scaled from its lowest to its highest value; its label holds both ends for screen readers.
export function curve(name, values) {
  const label = values.length ? `${name}: ${number(values[0], 3)} at first, ${number(values.at(-1), 3)} now` : `${name}: no values yet`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "curve");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  if (values.length > 1) {
    const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const points = values.map((value, i) => `${((100 * i) / (values.length - 1)).toFixed(2)},${(38 - (36 * (value - low)) / span).toFixed(2)}`);
    for (const [kind, d] of [["area", `M0,40 L${points.join(" L")} L100,40 Z`], ["", `M${points.join(" L")}`]]) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", d);
      if (kind) path.setAttribute("class", kind);
      svg.append(path);
    }
  }
  return svg;
}

export function bar(label, value, most, shown, kind = "") {
  return el("div", { class: "bar" }, el("span", {}, label),
    el("progress", { max: Math.max(most, 1e-9), value, "aria-label": label }), el("span", { class: kind }, shown));
}

// columns: [title, how to show a row, is it a number]
export function table(columns, rows) {
  const head = el("tr", {}, columns.map(([title, , isNumber]) => el("th", { scope: "col", class: isNumber ? "n" : "" }, title)));
  const body = rows.map((row) => el("tr", {}, columns.map(([, show, isNumber]) => el("td", { class: isNumber ? "n" : "" }, show(row)))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}
