// What is computed of curves before they are drawn: smoothing, bands, stacks, and a common x axis.

// An exponential moving average that does not lean towards its first value (as TensorBoard's).
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// The low and high edge of mean ± std, within min and max.
export function band(columns, name, [std, min, max]) {
  const mean = columns[name], wide = columns[std], low = columns[min], high = columns[max];
  if (!mean || !wide) return mean && low && high ? [low, high] : null;
  const edge = (sign, limit, choose) => mean.map((value, row) => {
    if (value === null || (wide[row] ?? null) === null) return null;
    const at = value + sign * wide[row];
    return limit?.[row] === null || limit?.[row] === undefined ? at : choose(at, limit[row]);
  });
  return [edge(-1, low, Math.max), edge(1, high, Math.min)];
}

// Columns of several tables on one sorted x axis; null where a table has no such x.
export function joined(tables) {
  if (tables.length === 1) return [tables[0].x, ...tables[0].columns];
  const x = [...new Set(tables.flatMap((table) => table.x))].sort((a, b) => a - b);
  const row = new Map(x.map((value, at) => [value, at]));
  return [x, ...tables.flatMap((table) => table.columns.map((values) => {
    const column = new Array(x.length).fill(null);
    table.x.forEach((value, at) => { column[row.get(value)] = values[at] ?? null; });
    return column;
  }))];
}

export function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  if (size >= 100) return `${+value.toFixed(1)}`;
  if (size >= 1e-3 || size === 0) return `${+value.toPrecision(3)}`;
  return value.toExponential(1);
}

const FAR = 100; // how many times larger a curve is that makes another one on its axis a flat line

// Lists of curves that have an axis of their own, the largest first; the order within each stays.
export function bySize(curves) {
  const sizes = curves.map(({ values }) => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0));
  const tops = [];
  for (const size of [...sizes].sort((a, b) => b - a)) if (!tops.length || (size > 0 && tops.at(-1) / size > FAR)) tops.push(size);
  const placeOf = (size) => Math.max(0, tops.findLastIndex((top) => size > 0 ? size <= top : true));
  return tops.map((_, place) => curves.filter((_, at) => placeOf(sizes[at]) === place));
}
