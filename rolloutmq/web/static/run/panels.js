// Panels of the run's view. A new one is a file that exports {title, draw(data, snapshot)}, and a row here; one
// with `path` draws what GET /api/panels/PATH answers (rolloutmq/web/panels.py). draw returns nodes, or null where
// there is nothing to show: the panel is hidden then.

import { el, patch } from "../frame/draw.js";
import { ask } from "../frame/server.js";
import { hosts } from "./hosts.js";
import { lanes } from "./lanes.js";
import { processes } from "./processes.js";

const EVERY_MS = 10_000; // between two readings of a panel

export const PANELS = [lanes, hosts, processes];

export class Panel {
  constructor(shown) {
    this.shown = shown;
    this.place = el("div");
    this.node = el("section", { class: `panel ${shown.path ?? ""}`, hidden: true }, el("h2", {}, shown.title), this.place);
    this.readAt = -Infinity;
  }

  async update(snapshot) {
    if (this.shown.path) {
      if (performance.now() - this.readAt < EVERY_MS) return;
      this.readAt = performance.now();
    }
    let nodes;
    try {
      nodes = this.shown.draw(this.shown.path ? await ask(`panels/${this.shown.path}`) : null, snapshot);
    } catch (error) {
      nodes = [el("p", { class: "bad" }, error.message)];
    }
    this.node.hidden = !nodes;
    patch(this.place, nodes ?? []);
  }
}
