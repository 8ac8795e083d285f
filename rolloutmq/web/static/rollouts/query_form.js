// A form that builds a query (buffer/query): what it built is shown, and may be edited.

import { el } from "../frame/draw.js";

const STAGES = ["waiting", "running", "pool", "taken", "dead"];
const STATUSES = ["init", "completed", "aborted", "expired", "failed", "filtered"];
const RANGES = [["reward", "any"], ["staleness", 1], ["version", 1], ["tokens", 1], ["tries", 1]];
export const ORDERS = ["reward", "tokens", "staleness", "version", "tries", "time", "size", "draw"];

// The query of the fields, as JSON; "" where none is set.
function build(form) {
  const query = {};
  for (const name of ["task", "stage", "status"]) if (form.elements[name].value) query[name] = form.elements[name].value;
  for (const [name] of RANGES) {
    const ends = { $gte: form.elements[`${name} from`].value, $lte: form.elements[`${name} to`].value };
    const given = Object.entries(ends).filter(([, value]) => value !== "").map(([operator, value]) => [operator, Number(value)]);
    if (given.length) query[name] = Object.fromEntries(given);
  }
  return Object.keys(query).length ? JSON.stringify(query) : "";
}

// Set the fields from a query; false where the form has no fields for it.
function fill(form, where) {
  let query;
  try { query = JSON.parse(where || "{}"); } catch { return false; }
  for (const [name, value] of Object.entries(query ?? {})) {
    if (form.elements[name] && typeof value === "string") { form.elements[name].value = value; continue; }
    for (const [operator, end] of [["$gte", "from"], ["$lte", "to"]]) {
      if (value?.[operator] !== undefined && form.elements[`${name} ${end}`]) form.elements[`${name} ${end}`].value = value[operator];
    }
  }
  return build(form) === JSON.stringify(query);
}

const choice = (name, values) => el("label", {}, name, el("select", { name }, el("option", { value: "" }, "any"), values.map((value) => el("option", { value }, value))));
const range = ([name, step]) => el("span", { class: "range" }, name,
  ["from", "to"].map((end) => el("input", { name: `${name} ${end}`, type: "number", step, "aria-label": `${name} ${end}`, placeholder: end })));

// search(parameters) is called with {text, where, order} when the form is submitted.
export function queryForm(query, tasks, search) {
  const where = query.get("where") || "", order = query.get("order") || "";
  const fields = el("fieldset", { class: "fields" }, choice("task", tasks), choice("stage", STAGES), choice("status", STATUSES), RANGES.map(range),
    el("label", {}, "sort", el("select", { name: "order" }, el("option", { value: "" }, "as in the queue"), ORDERS.flatMap((name) => [["-", "highest"], ["", "lowest"]].map(([sign, words]) => el("option", { value: sign + name, selected: order === sign + name }, `${name}, ${words} first`))))));
  const written = el("input", { name: "where", value: where, "aria-label": "query as JSON", placeholder: '{"status": "completed", "staleness": {"$gte": 1}}', spellcheck: "false" });
  const form = el("form", { class: "query", role: "search", onsubmit: (event) => {
    event.preventDefault();
    search({ text: form.elements.text.value.trim(), where: written.value.trim(), order: form.elements.order.value });
  } },
  el("div", { class: "line" }, el("input", { name: "text", type: "search", value: query.get("text") || "", "aria-label": "words or the id of a group", placeholder: "words in prompts and responses, or the id of a group" }), el("button", {}, "Find"), el("button", { type: "button", onclick: () => search({ text: "", where: "", order: "" }) }, "Clear")),
  el("details", { class: "more-fields", open: Boolean(where || order) || matchMedia("(min-width: 50rem)").matches }, el("summary", {}, "filters"), fields), el("label", { class: "line" }, el("span", { class: "dim" }, "query"), written));
  if (where && !fill(form, where)) fields.disabled = true; // written by hand: the form would replace it by less
  fields.addEventListener("change", (event) => {
    if (event.target.name !== "order") written.value = build(form);
    form.requestSubmit();
  });
  return form;
}
