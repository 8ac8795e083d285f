// The logs of all processes, newest last, with what is new; beside them all lines about one group,
// worker or train step. The address has the filters: #/logs?process=worker&level=warning.

import { el } from "../frame/draw.js";
import { listen } from "../frame/server.js";
import { groupLink } from "../rollouts/rollouts.js";

const MOST = 2000, LEVELS = ["", "info", "warning", "error"];
const FILTERS = ["process", "level", "about", "text", "since", "until"];
const ABOUT = ["gid", "step", "worker"]; // fields that the lines of other processes share
let form = null, following = null, place = null;

export const logs = {
  async open(route, page) {
    following?.abort();
    following = new AbortController();
    place = el("div", { class: "lines", role: "log", tabindex: "0", "aria-label": "Lines" });
    const beside = el("aside", { class: "panel", hidden: true }), note = el("p", { class: "dim" });
    form = filters(route.query);
    const first = await follow(route.query, place, following.signal, (lines) => add(place, lines, (about) => showBeside(beside, about, page)), page);
    for (const name of first.processes ?? []) form.elements.process.append(el("option", { value: name }, name));
    form.elements.process.value = route.query.get("process") ?? "";
    if (!first.lines.length) note.append("No line of a process that `rolloutmq run` started on this machine matches.");
    if (first.is_cut) note.append("Lines further back were not searched: `less` opens the files in logs/ of the run's folder.");
    return [form, note, el("div", { class: "beside" }, place, beside)];
  },
  update() { },
  close() {
    following.abort();
  },
};

function filters(query) {
  const field = (name, words, type = "search") => el("label", {}, `${words} `, el("input", { name, type, value: query.get(name) ?? "", step: "1" }));
  return el("form", { class: "filters", onchange: apply, onsubmit: apply },
    el("label", {}, "process ", el("select", { name: "process" }, el("option", { value: "" }, "all"))),
    el("label", {}, "level ", el("select", { name: "level" }, LEVELS.map((name) => el("option", { value: name, selected: name === query.get("level") }, name ? `${name} and above` : "all")))),
    field("about", "group, worker or step"), field("text", "text"), field("since", "from", "datetime-local"), field("until", "to", "datetime-local"));
}

function apply(event) {
  event.preventDefault();
  const chosen = FILTERS.map((name) => [name, form.elements[name].value.trim()]).filter(([, value]) => value);
  location.hash = `#/logs?${new URLSearchParams(chosen)}`;
}

// Return the first event, and give the lines of all to `onLines` until `signal` is aborted.
function follow(query, shown, signal, onLines, page) {
  return new Promise((resolve, reject) => {
    listen(`logs?${query}`, signal, (event) => { resolve(event); onLines(event.lines); })
      .then(() => signal.aborted || page.trouble("`rolloutmq web` was stopped"))
      .catch((error) => { if (!signal.aborted) { reject(error); page.trouble(error.message); } });
  });
}

function add(shown, lines, onAbout) {
  const isAtEnd = shown.scrollHeight - shown.scrollTop - shown.clientHeight < 40;
  shown.append(...lines.map((line) => row(line, onAbout)));
  while (shown.childElementCount > MOST) shown.firstChild.remove();
  if (isAtEnd) requestAnimationFrame(() => { shown.scrollTop = shown.scrollHeight; });
}

function row({ time, process, level, message, exception, fields }, onAbout) {
  const known = Object.entries(fields).flatMap(([name, value]) => [" ", el("span", { class: "dim" }, `${name} `),
    onAbout && ABOUT.includes(name) ? el("button", { type: "button", class: "link", onclick: () => onAbout(value) }, value) : value]);
  return el("div", { class: `line ${level}` }, el("time", { class: "dim", title: time }, time.slice(11, 23)), " ", el("b", {}, process), " ",
    el("span", { class: "message" }, message), known, exception ? el("pre", {}, exception) : null);
}

async function showBeside(beside, about, page) {
  const shown = el("div", { class: "lines" }), once = new AbortController();
  const all = el("a", { href: `#/logs?${new URLSearchParams({ about })}` }, "its lines alone");
  const close = el("button", { type: "button", onclick: () => { beside.hidden = true; } }, "Close");
  await follow(new URLSearchParams({ about }), shown, once.signal, (lines) => { add(shown, lines); once.abort(); }, page);
  const group = /-\d{10,}$/.test(about) ? groupLink(about) : null;
  beside.replaceChildren(el("h3", {}, "About ", group ?? (/^\d+$/.test(about) ? `step ${about}` : about), ": ", all, " ", close), shown);
  beside.hidden = false;
}
