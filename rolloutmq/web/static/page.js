// The views of one run. Each is drawn from the newest snapshot of the stream, or from the answer to one request.

import { age, bar, bytes, curve, el, number, panel, table } from "./draw.js";
import { showGroup } from "./rollout.js";
import { ask, follow, hasToken } from "./server.js";

const STAGES = ["waiting", "running", "completed", "aborted", "expired", "taken", "archived", "filtered", "dropped", "dead"];
const GID = /^[\w.-]+-\d{10}$/;
const view = document.getElementById("view");
let snapshot = null, colour = "version";

const groupLink = (gid) => el("a", { href: `#/groups/${encodeURIComponent(gid)}` }, gid);
const trouble = (words) => { const line = document.getElementById("trouble"); line.hidden = !words; line.textContent = words; };

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

function showRun() {
  const { status, waits, curves } = snapshot;
  const tasks = Object.entries(status.tasks);
  const parts = [
    ...[["Reward", "rewards/mean", 3], ["Tokens per second", "tokens_per_s", 0], ["Seconds per train step", "time/step_s", 2], ["Mean staleness", "staleness/mean", 2]]
      .filter(([, name]) => curves[name].length)
      .map(([title, name, digits]) => panel(title, number(curves[name].at(-1), digits), curve(title, curves[name]))),
    panel("Waiting", "share of the observed time", Object.entries(waits).map(([who, wait]) => bar(who, wait.share, 1, `${number(100 * wait.share)} %`, wait.now ? "near" : ""))),
    panel("Memory", null, ...(status.memory.high_bytes
      ? [bar("payloads", status.memory.held_bytes, status.memory.high_bytes, bytes(status.memory.held_bytes)), el("p", { class: "dim" }, `new prompts wait above ${bytes(status.memory.low_bytes)}`)]
      : [el("p", {}, `payloads hold ${bytes(status.memory.held_bytes)}`), el("p", { class: "dim" }, "no limit is set")])),
  ];
  for (const [name, task] of tasks) {
    const ages = Object.entries(task.staleness), most = Math.max(1, ...ages.map(([, n]) => n));
    parts.push(panel(name, `mean score ${number(task.mean_reward, 3)}`,
      bar("ahead", task.started, task.may_start || task.started, `${task.started} / ${task.may_start}`, task.may_start && task.started >= task.may_start ? "near" : ""),
      ages.map(([staleness, n]) => bar(`staleness ${staleness}`, n, most, number(n))),
      task.too_old ? el("p", { class: "near" }, `${task.too_old} too old, about to expire`) : null,
      task.ended_early ? el("p", { class: "dim" }, `${task.ended_early} ended early, too old (${number(task.discarded_tokens)} tokens)`) : null,
      task.trouble ? el("p", { class: "bad" }, task.trouble) : null));
  }
  const count = (n) => el("span", { class: n ? "" : "dim" }, number(n));
  const columns = [["stage", (row) => row], ...tasks.map(([name, task]) => [name, (row) => count(task.places[row]), true])];
  const groups = panel("Groups by stage", null, table(columns, STAGES));
  groups.classList.add(tasks.length > 3 ? "wide" : "tall");
  return [el("div", { class: "panels" }, groups, parts)];
}

async function showGroups(parameters) {
  const where = parameters.get("where") || "", order = parameters.get("order") || "";
  const form = el("form", { class: "query", onsubmit: (event) => {
    event.preventDefault();
    const asked = form.elements.where.value.trim();
    if (GID.test(asked)) location.hash = `#/groups/${asked}`;
    else location.hash = `#/groups?${new URLSearchParams({ where: form.elements.where.value, order: form.elements.order.value })}`;
  } }, el("input", { name: "where", value: where, "aria-label": "query as JSON", placeholder: '{"status": "completed", "staleness": {"$gte": 1}}, or the id of a group' }),
  el("input", { name: "order", value: order, "aria-label": "order", placeholder: "order: -tokens", style: null }), el("button", {}, "Find"));
  let rows;
  try {
    rows = await ask(`groups?${new URLSearchParams({ where: where || "{}", order, limit: 200 })}`);
  } catch (error) {
    return [form, el("p", { class: "bad", role: "alert" }, error.message)];
  }
  const found = table([
    ["group", (r) => groupLink(r.gid)], ["stage", (r) => r.stage], ["status", (r) => r.status], ["version", (r) => r.version ?? "–", true],
    ["staleness", (r) => r.staleness ?? "–", true], ["tries", (r) => r.tries, true], ["tokens", (r) => number(r.tokens), true],
    ["reward", (r) => number(r.reward, 3), true], ["held by", (r) => r.owner ?? r.batch ?? ""],
  ], rows);
  return [form, rows.length ? found : el("p", { class: "dim" }, "no group matches"), rows.length === 200 ? el("p", { class: "dim" }, "only the first 200 are shown") : null];
}

async function showOneGroup(gid) {
  const group = await ask(`groups/${encodeURIComponent(gid)}`);
  const choose = (wanted) => { colour = wanted; render(); };
  return showGroup(group, colour, choose, hasToken() && group.may.length ? el("p", {}, group.may.flatMap((verb) => [act(`groups/${gid}/${verb}`, verb === "drop" ? "Drop" : "Requeue"), " "])) : null);
}

function showWorkers() {
  const newest = `${snapshot.status.weights.lineage}:${snapshot.status.weights.version}`;
  const columns = [
    ["worker", (w) => w.id], ["engine", (w) => w.engine], ["state", (w) => w.state],
    ["weights", (w) => el("span", { class: w.weights === newest ? "" : "near" }, w.weights || "–")],
    ["seen", (w) => `${age(w.silent_ms)} ago`, true], ["holds", (w) => w.holds, true], ["judging", (w) => number(w.judging), true], ["tokens/s", (w) => number(w.tokens_per_s), true], ["done", (w) => number(w.done), true],
  ];
  return snapshot.status.workers.length ? [table(columns, snapshot.status.workers)] : [el("p", { class: "near" }, "no worker has registered")];
}

async function showDead() {
  const letters = await ask("dead");
  const columns = [["group", (l) => groupLink(l.gid)], ["age", (l) => age(l.age_ms), true], ["tries", (l) => l.tries, true], ["worker", (l) => l.worker], ["reason", (l) => l.reason]];
  if (hasToken()) columns.push(["", (l) => act(`groups/${l.gid}/requeue`, "Requeue")]);
  return letters.length ? [table(columns, letters)] : [el("p", { class: "good" }, "no dead letters")];
}

function showEvents() {
  const details = ({ at_ms, event, ...fields }) => Object.entries(fields).map(([name, value]) => `${name}=${value}`).join(" ");
  return [table([["when", (e) => new Date(e.at_ms).toLocaleTimeString([], { hour12: false })], ["event", (e) => e.event], ["", details]], [...snapshot.events].reverse())];
}

function act(path, words) {
  return el("button", { type: "button", onclick: async () => {
    try { await ask(path, "POST"); trouble(""); } catch (error) { trouble(error.message); }
    render();
  } }, words);
}

const LIVE = { run: showRun, workers: showWorkers, events: showEvents };
const ASKED = { groups: showGroups, dead: showDead };
let drawing = 0;

async function render() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, gid] = path.split("/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${name || "run"}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const mine = ++drawing;
  try {
    const parts = gid ? await showOneGroup(decodeURIComponent(gid)) : await (ASKED[name] || (snapshot ? LIVE[name] || showRun : () => []))(new URLSearchParams(query));
    if (mine === drawing) view.replaceChildren(...parts.filter(Boolean));
  } catch (error) {
    if (mine === drawing) view.replaceChildren(el("p", { class: "bad", role: "alert" }, error.message));
  }
}

addEventListener("hashchange", () => { render(); view.focus({ preventScroll: true }); });
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const link = document.querySelector(`nav a[accesskey="${CSS.escape(event.key)}"]`);
  if (link) location.hash = link.getAttribute("href");
});
document.getElementById("acts").hidden = !hasToken();
for (const button of document.querySelectorAll("[data-act]")) {
  button.addEventListener("click", () => ask(button.dataset.act, "POST").then(() => trouble(""), (error) => trouble(error.message)));
}
render();
follow((newest) => {
  snapshot = newest.status ? newest : snapshot;
  trouble(newest.trouble || "");
  if (!snapshot) return;
  headline();
  if (!/#\/(groups|dead)/.test(location.hash)) render();
}, trouble);
