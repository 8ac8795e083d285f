// What a report knows of its run: facts, settings and versions.

import { el } from "./draw.js";
import { saved } from "./server.js";

const list = (facts) => el("dl", { class: "panel" }, Object.entries(facts).flatMap(([name, value]) => [el("dt", { class: "dim" }, name), el("dd", {}, String(value))]));

export const about = {
  open: () => [list(saved.facts), el("h2", {}, "Settings of the newest start"), el("pre", {}, JSON.stringify(saved.settings, null, 2)),
    el("h2", {}, "Versions"), list(saved.versions)],
};
