// Dead letters, newest first.

import { age, el, table } from "../frame/draw.js";
import { ask, hasToken } from "../frame/server.js";
import { groupLink } from "../rollouts/rollouts.js";
import { act } from "./acts.js";

export const dead = {
  async open(route, page) {
    const letters = await ask("dead");
    const columns = [["group", (l) => groupLink(l.gid)], ["age", (l) => age(l.age_ms), true], ["tries", (l) => l.tries, true], ["worker", (l) => l.worker], ["reason", (l) => l.reason]];
    if (hasToken()) columns.push(["", (l) => act(`groups/${l.gid}/requeue`, "Requeue", page)]);
    return letters.length ? [table(columns, letters)] : [el("p", { class: "good" }, "no dead letters")];
  },
};
