// Make elements from plain data. Text stays text: what a model wrote is never parsed as HTML.

const HANDLERS = ["onclick", "onsubmit", "onchange", "oninput", "onkeydown", "ontoggle"];

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (HANDLERS.includes(name)) made[name] = value;
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

export function bar(label, value, most, shown, kind = "") {
  return el("div", { class: "bar" }, el("span", {}, label),
    el("progress", { max: Math.max(most, 1e-9), value, "aria-label": label }), el("span", { class: kind }, shown));
}

// Words between `…` are commands and names.
export function code(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

// Rows of bars whose labels and numbers stand below one another.
export const bars = (...rows) => el("div", { class: "bars" }, ...rows);

// columns: [title, how to show a row, is it a number, or "text" that wraps]
export function table(columns, rows) {
  const head = el("tr", {}, columns.map(([title, , kind]) => el("th", { scope: "col", class: classOf(kind) }, title)));
  // on a narrow screen, the rows of a wide table become blocks, in which each of many values has its name
  const hasNames = columns.length > 4;
  const body = rows.map((row) => el("tr", {}, columns.map(([title, show, kind]) => el("td", { class: classOf(kind), "data-name": hasNames ? title : null }, show(row)))));
  return el("div", { class: "scroll" }, el("table", { class: hasNames || columns.some(([, , kind]) => kind === "text") ? "wide-table" : "" }, el("thead", {}, head), el("tbody", {}, body)));
}

const classOf = (kind) => (kind === "text" ? kind : kind ? "n" : "");

// Make the children of a place equal to some nodes, and change only what differs, so that the
// focus, a selection and an opened <details> stay while numbers change each second.
export function patch(place, nodes) {
  const wanted = nodes.flat().filter((node) => node !== null && node !== undefined && node !== false);
  wanted.forEach((node, at) => {
    const had = place.childNodes[at];
    if (!had) place.append(node);
    else if (!isAlike(had, node)) had.replaceWith(node);
    else if (had !== node) update(had, node);
  });
  while (place.childNodes.length > wanted.length) place.lastChild.remove();
}

const isAlike = (had, node) => had.nodeName === node.nodeName && had.dataset?.key === node.dataset?.key;

function update(had, node) {
  if (had.nodeType === Node.TEXT_NODE) {
    if (had.data !== node.data) had.data = node.data;
    return;
  }
  for (const { name } of [...had.attributes]) {
    if (!node.hasAttribute(name) && !(name === "open" && had.tagName === "DETAILS")) had.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (had.getAttribute(name) !== value) had.setAttribute(name, value);
  }
  for (const name of HANDLERS) had[name] = node[name];
  if (!("keep" in had.dataset)) patch(had, [...node.childNodes]);
}
