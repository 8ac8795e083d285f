// Histograms of all steps as a heat map: a column for each step, a cell for each bin, the darker the more of the
// step's values lie in it. A histogram: {width, first, counts} (consumer/handle/histogram.py).

import { shortNumber } from "./curves.js";

const lowOf = ({ width, first }) => width * first;
const highOf = ({ width, first, counts }) => width * (first + counts.length);

// The lowest and the highest value of each step, by which uPlot chooses the axis.
export const ends = (values) => [values.map((found) => found && lowOf(found)), values.map((found) => found && highOf(found))];

export function paint(u, { x, values }, colour) {
  const { ctx } = u, place = (value, axis) => u.valToPos(value, axis, true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  ctx.fillStyle = colour;
  const cells = values.flatMap((found, row) => {
    if (!found) return [];
    const total = found.counts.reduce((a, b) => a + b, 0), gap = (x[row + 1] ?? x[row]) - (x[row + 1] === undefined ? x[row - 1] ?? x[row] - 1 : x[row]);
    const left = Math.round(place(x[row] - gap / 2, "x")), right = Math.round(place(x[row] + gap / 2, "x"));
    return found.counts.map((count, bin) => {
      const top = Math.round(place(found.width * (found.first + bin + 1), "y")), bottom = Math.round(place(found.width * (found.first + bin), "y"));
      const height = Math.max(2, bottom - top);
      return { share: count / total / height, box: [left, top, Math.max(1, right - left), height] };
    }).filter(({ share }) => share);
  });
  const most = cells.reduce((high, { share }) => Math.max(high, share), 0);
  for (const { share, box } of cells) {
    ctx.globalAlpha = 0.12 + 0.88 * Math.sqrt(share / most); // few are seen, too
    ctx.fillRect(...box);
  }
  ctx.restore();
}

// What a legend says of a step: the bin at `height`, or that with most values.
export function wordsOf(found, height = null) {
  if (!found) return "–";
  const total = found.counts.reduce((a, b) => a + b, 0), at = height === null ? -1 : Math.floor(height / found.width) - found.first;
  const bin = found.counts[at] === undefined ? found.counts.indexOf(Math.max(...found.counts)) : at, low = found.width * (found.first + bin);
  return `${shortNumber(low)} to ${shortNumber(low + found.width)}: ${found.counts[bin]} of ${total}`;
}
