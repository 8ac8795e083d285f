// The newest events of the run.

import { el, table } from "../frame/draw.js";

const place = el("div");
const details = ({ at_ms, event, ...fields }) => Object.entries(fields).map(([name, value]) => `${name}=${value}`).join(" ");

export const events = {
  open: () => [place],
  update(snapshot) {
    place.replaceChildren(table([["when", (e) => new Date(e.at_ms).toLocaleTimeString([], { hour12: false })], ["event", (e) => e.event], ["", details]], [...snapshot.events].reverse()));
  },
};
