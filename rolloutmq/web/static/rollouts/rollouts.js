// The rollouts page: groups found by a query, or the one group that the address names.

import { el, number, table } from "../frame/draw.js";
import { ask } from "../frame/server.js";
import { groupActs } from "../control/acts.js";
import { showGroup } from "./rollout.js";

const GID = /^[\w.-]+-\d{10}$/;
let colour = "version";

export const groupLink = (gid) => el("a", { href: `#/groups/${encodeURIComponent(gid)}` }, gid);

export const rollouts = { open: (route, page) => (route.id ? showOneGroup(route.id, page) : showGroups(route.query)) };

async function showGroups(query) {
  const where = query.get("where") || "", order = query.get("order") || "";
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

async function showOneGroup(gid, page) {
  const group = await ask(`groups/${encodeURIComponent(gid)}`);
  const choose = (wanted) => { colour = wanted; page.reopen(); };
  return showGroup(group, colour, choose, groupActs(gid, group.may, page));
}
