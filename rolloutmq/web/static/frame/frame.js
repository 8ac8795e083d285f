// The frame of the page: headline, navigation, and the view that the address names (#/VIEW/ID?query).
//
// A view is a module of its own that exports an object:
//   open(route, page)    returns what the view shows, an array of nodes or a promise of one;
//                        route = {id, query: URLSearchParams}
//   update(snapshot)     optional: called for each snapshot of the stream while the view is open
//   close()              optional
// page = {snapshot(): the newest or null, trouble(words), reopen()}

import { age, el, number } from "./draw.js";
import { follow } from "./server.js";
import { acts } from "../control/acts.js";
import { dead } from "../control/dead.js";
import { workers } from "../control/workers.js";
import { rollouts } from "../rollouts/rollouts.js";
import { events } from "../run/events.js";
import { overview } from "../run/overview.js";

const VIEWS = { run: overview, groups: rollouts, workers, dead, events };
const main = document.getElementById("view");
let snapshot = null, opened = null, opening = 0;

function trouble(words) {
  const line = document.getElementById("trouble");
  if (line.textContent !== words) line.textContent = words;
  line.hidden = !words;
}

const page = { snapshot: () => snapshot, trouble, reopen: () => open() };

async function open() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const view = VIEWS[name] ?? overview;
  for (const link of document.querySelectorAll("nav a")) {
    if (VIEWS[link.getAttribute("href").slice(2)] === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const mine = ++opening;
  opened?.close?.();
  opened = null;
  let parts;
  try {
    parts = await view.open({ id: id && decodeURIComponent(id), query: new URLSearchParams(query) }, page);
  } catch (error) {
    parts = [el("p", { class: "bad", role: "alert" }, error.message)];
  }
  if (mine !== opening) return;
  main.replaceChildren(...parts.filter(Boolean));
  opened = view;
  if (snapshot) view.update?.(snapshot);
}

function headline() {
  const { status } = snapshot;
  document.getElementById("run").textContent = status.run;
  document.title = `${status.run}: step ${status.steps.taken}`;
  const running = `${number(status.leases)} running` + (status.judging ? `, of which ${number(status.judging)} ${status.judging === 1 ? "is" : "are"} being judged` : "");
  const paused = status.paused_by ? `${status.mode}, paused by the ${status.paused_by} ${age(status.mode_age_ms)} ago` : status.mode;
  document.getElementById("headline").textContent =
    `${paused} · step ${status.steps.taken} · weights ${status.weights.version} · trainer ${status.trainer.state} · producer ${status.producer.state} · ${running} · ${number(status.tokens_per_s)} tokens/s`;
  const account = document.getElementById("account");
  account.className = status.adds_up ? "good" : "bad";
  account.textContent = status.adds_up ? "every group is accounted for" : `the account does not add up: ${status.faults.join("; ")}`;
  document.getElementById("dead-count").textContent = status.dead_letters ? `(${status.dead_letters})` : "";
}

addEventListener("hashchange", () => { open(); main.focus({ preventScroll: true }); });
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const link = document.querySelector(`nav a[accesskey="${CSS.escape(event.key)}"]`);
  if (link) location.hash = link.getAttribute("href");
});
acts(page);
open();
follow((newest) => {
  snapshot = newest.status ? newest : snapshot;
  trouble(newest.trouble || "");
  if (!snapshot) return;
  headline();
  opened?.update?.(snapshot);
}, trouble);
