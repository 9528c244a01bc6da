// Curves: the panel kind "lines". Labels stand at the curves' ends where there is room.
const LINE = { top: 34, bottom: 40, tick: 11, gap: 8 };

function finite(values) {
  return (values || []).filter((v) => v !== null && Number.isFinite(v));
}

function extent(values) {
  let [lo, hi] = [Infinity, -Infinity];
  for (const v of values) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
  return [lo, hi];
}

/** [lo, hi] of y over all panels given, with air around the curves. */
function yDomain(panels, window) {
  const first = panels[0];
  const inside = (x) => !window || (x >= window[0] && x <= window[1]);
  const values = [];
  for (const panel of panels) {
    for (const s of panel.series) {
      for (const part of [s.y, s.low, s.high]) {
        values.push(...finite((part || []).filter((_, i) => inside(s.x[i]))));
      }
    }
    values.push(...panel.marks.map((m) => m[0]));
  }
  let [lo, hi] = extent(first.log_y ? values.filter((v) => v > 0) : values);
  if (lo > hi) [lo, hi] = [first.log_y ? 0.1 : 0, 1];
  if (first.log_y) return [lo / 1.15, hi * 1.15];
  const span = hi - lo || Math.abs(hi) || 1;
  const low = first.zero ? Math.min(0, lo) : lo - 0.06 * span;
  return [lo >= 0 ? Math.max(0, low) : low, hi + 0.08 * span];
}

function xDomain(panel) {
  const [lo, hi] = extent(panel.series.flatMap((s) => finite(s.x)));
  if (lo > hi) return [0, 1];
  if (!panel.log_x && lo > 0 && lo < 0.2 * hi) return [0, hi];
  return lo === hi ? [panel.log_x ? lo / 2 : lo - 0.5, panel.log_x ? hi * 2 : hi + 0.5] : [lo, hi];
}

function named(panel) {
  return panel.series.filter((s) => s.label && s.style !== "faint");
}

/** Whether labels fit at the curves' ends; otherwise a legend goes on top. */
function direct(panel, width) {
  const few = named(panel);
  const widest = Math.max(0, ...few.map((s) => textWidth(s.label, 12, 600)));
  return few.length <= 7 && widest < 0.3 * width && width >= 400 ? widest + 12 : 0;
}

function legendRows(panel, width) {
  const rows = [];
  let x = Infinity;
  for (const s of named(panel)) {
    const needs = textWidth(s.label, 12) + 34;
    if (x + needs > width) { rows.push([]); x = 0; }
    rows.at(-1).push([s, x]);
    x += needs;
  }
  return rows;
}

function drawLines(panel, width, height, options) {
  const group = node("g");
  const end = direct(panel, width);
  const legend = end || named(panel).length < 2 ? [] : legendRows(panel, width);
  const top = LINE.top + (panel.title ? 18 : 0) + legend.length * 18;
  const x0 = options.window || xDomain(panel);
  const y0 = yDomain(options.together || [panel], options.window);
  const y = scale(...y0, height - LINE.bottom, top, panel.log_y);
  const yTicks = y.ticks(5);
  const left = Math.max(...yTicks.map((v) => textWidth(say(v, panel.percent), 11)), 16) + LINE.gap;
  const x = scale(...x0, left, width - (end || 10), panel.log_x);
  const frame = { x, y, left, right: width - (end || 10), top, bottom: height - LINE.bottom };

  if (panel.title) group.append(label(fit(panel.title, width, 13, 600), 0, 14, "strong"));
  legend.forEach((row, i) => drawLegend(group, row, (panel.title ? 32 : 14) + i * 18));
  const above = top - 16;
  group.append(label(fit(panel.y_label, width - 10), 0, above, "soft"));
  drawAxes(group, panel, frame, yTicks);
  drawCurves(group, panel, frame, options.id);
  if (end) drawEnds(group, panel, frame);
  group.frame = frame;
  return group;
}

function drawLegend(group, row, y) {
  for (const [s, x] of row) {
    group.append(
      node("line", { x1: x, x2: x + 16, y1: y - 4, y2: y - 4, class: `curve c${s.colour} ${s.style || ""}` }),
      label(s.label, x + 21, y, "small"),
    );
  }
}

function drawAxes(group, panel, f, yTicks) {
  for (const v of yTicks) {
    const at = f.y(v);
    if (at < f.top - 1 || at > f.bottom + 1) continue;
    group.append(
      node("line", { x1: f.left, x2: f.right, y1: at, y2: at, class: "grid" }),
      label(say(v, panel.percent), f.left - LINE.gap, at + 4, "tick end"),
    );
  }
  group.append(node("line", { x1: f.left, x2: f.right, y1: f.bottom, y2: f.bottom, class: "axis" }));
  for (const v of f.x.ticks(Math.max(2, Math.floor((f.right - f.left) / 75)))) {
    const at = f.x(v);
    group.append(
      node("line", { x1: at, x2: at, y1: f.bottom, y2: f.bottom + 4, class: "axis" }),
      label(say(v), at, f.bottom + 17, "tick middle"),
    );
  }
  group.append(label(panel.x_label, f.right, f.bottom + 34, "soft end"));
  for (const [value, text] of panel.marks) {
    const at = f.y(value);
    group.append(
      node("line", { x1: f.left, x2: f.right, y1: at, y2: at, class: "mark" }),
      label(fit(text, f.right - f.left, 11), f.left + 4, at - 5, "tick halo"),
    );
  }
}

function path(s, f) {
  let d = "";
  let open = false;
  s.x.forEach((x, i) => {
    const y = s.y[i];
    if (y === null || y === undefined) { open = false; return; }
    d += `${open ? "L" : "M"}${f.x(x).toFixed(1)},${f.y(y).toFixed(1)}`;
    open = true;
  });
  return d;
}

function band(s, f) {
  const rows = s.x.map((x, i) => [x, s.low[i], s.high[i]]).filter((r) => r[1] !== null && r[2] !== null);
  const up = rows.map(([x, , hi]) => `${f.x(x).toFixed(1)},${f.y(hi).toFixed(1)}`);
  const down = rows.reverse().map(([x, lo]) => `${f.x(x).toFixed(1)},${f.y(lo).toFixed(1)}`);
  return up.length ? `M${up.join("L")}L${down.join("L")}Z` : "";
}

function drawCurves(group, panel, f, id) {
  const clip = `clip-${id}`;
  group.append(
    node("clipPath", { id: clip }, node("rect", {
      x: f.left - 5, y: f.top - 5, width: f.right - f.left + 10, height: f.bottom - f.top + 6,
    })),
  );
  const curves = node("g", { "clip-path": `url(#${clip})` });
  for (const s of panel.series) {
    if (s.low.length) curves.append(node("path", { d: band(s, f), class: `band c${s.colour} ${s.style}` }));
  }
  for (const s of panel.series) {
    if (!s.y.length || s.style === "band") continue;
    curves.append(node("path", { d: path(s, f), class: `curve c${s.colour} ${s.style}` }));
    if (s.style === "points" || finite(s.y).length === 1) {
      s.x.forEach((x, i) => s.y[i] === null || curves.append(
        node("circle", { cx: f.x(x), cy: f.y(s.y[i]), r: 3.5, class: `dot c${s.colour}` })));
    }
  }
  group.append(curves);
}

/** Labels at the curves' right ends, moved apart where they would overlap. */
function drawEnds(group, panel, f) {
  const ends = named(panel).map((s) => {
    const values = s.style === "band" ? s.high : s.y;
    let i = s.x.length - 1;
    const inside = (k) => f.x(s.x[k]) <= f.right + 1 && values[k] !== null;
    while (i > 0 && !inside(i)) i--;
    return { s, y: Math.min(f.bottom, Math.max(f.top, f.y(values[i] ?? 0))) };
  }).sort((a, b) => a.y - b.y);
  for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 15);
  const over = ends.length ? Math.max(0, ends.at(-1).y - f.bottom) : 0;
  for (let i = ends.length - 1, limit = Infinity; i >= 0; i--) {
    ends[i].y = Math.min(ends[i].y - (i === ends.length - 1 ? over : 0), limit);
    limit = ends[i].y - 15;
  }
  for (const { s, y } of ends) group.append(label(s.label, f.right + 8, y + 4, `name c${s.colour}`));
}
