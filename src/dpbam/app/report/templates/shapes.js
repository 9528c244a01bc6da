// The other panel kinds: dots with intervals, shaded grids, vectors in the plane.

function dotsHeight(panel) {
  const lane = Math.max(panel.categories.length > 12 ? 22 : 32, panel.series.length * 9 + 10);
  return 62 + (panel.title ? 18 : 0) + (panel.series.length > 1 ? 20 : 0) + lane * panel.categories.length;
}

function drawDots(panel, width, height) {
  const group = node("g");
  const several = panel.series.length > 1;
  const top = 18 + (panel.title ? 18 : 0) + (several ? 20 : 0);
  const lane = (height - 44 - top) / Math.max(1, panel.categories.length);
  const widest = Math.max(...panel.categories.map((c) => textWidth(c, 12)));
  const left = Math.min(widest, width * 0.38) + 14;
  const values = panel.series.flatMap((s) => [...finite(s.low), ...finite(s.high), ...finite(s.values)]);
  const [lo, hi] = extent(values.length ? values : [0, 1]);
  const x = scale(panel.percent ? Math.max(0, lo - 0.04) : lo, panel.percent ? Math.min(1, hi + 0.04) : hi,
    left, width - 12);
  if (panel.title) group.append(label(fit(panel.title, width, 13, 600), 0, 14, "strong"));
  if (several) drawLegend(group, legendRows({ series: panel.series }, width)[0], panel.title ? 34 : 16);
  for (const v of x.ticks(Math.max(3, Math.floor((width - left) / 80)))) {
    group.append(
      node("line", { x1: x(v), x2: x(v), y1: top, y2: height - 40, class: "grid" }),
      label(say(v, panel.percent), x(v), height - 24, "tick middle"),
    );
  }
  group.append(label(panel.x_label, width - 12, height - 6, "soft end"));
  panel.categories.forEach((category, i) => {
    const middle = top + lane * (i + 0.5);
    group.append(label(fit(category, left - 14), left - 12, middle + 4, "small end"));
    panel.series.forEach((s, k) => {
      const y = middle + (k - (panel.series.length - 1) / 2) * 9;
      if (s.values[i] === null) return;
      const tip = `${category}, ${s.label}: ${say(s.values[i], panel.percent)} ` +
        `(95%: ${say(s.low[i], panel.percent)} to ${say(s.high[i], panel.percent)})`;
      group.append(
        node("line", { x1: x(s.low[i]), x2: x(s.high[i]), y1: y, y2: y, class: `whisker c${s.colour}` }),
        node("circle", { cx: x(s.values[i]), cy: y, r: 4.5, class: `dot c${s.colour}`, "data-tip": tip }),
      );
    });
  });
  return group;
}

function matrixHeight(panel, width) {
  const cell = (width - matrixLeft(panel, width)) / panel.column_names.length;
  const tall = panel.square ? Math.min(cell, 44) : Math.max(9, Math.min(22, 260 / panel.row_names.length));
  return tall * panel.row_names.length + matrixTop(panel) + matrixBelow(panel);
}

function matrixLeft(panel, width) {
  const widest = Math.max(...panel.row_names.map((n) => textWidth(n, 11)));
  return Math.min(widest, width * 0.34) + 26;
}

function matrixBelow(panel) {
  return panel.square ? 64 : 46;
}

function matrixTop(panel) {
  return 14 + (panel.title ? 20 : 0);
}

function drawMatrix(panel, width, height) {
  const group = node("g");
  const [left, top] = [matrixLeft(panel, width), matrixTop(panel)];
  const rows = panel.row_names.length;
  const columns = panel.column_names.length;
  const h = (height - top - matrixBelow(panel)) / rows;
  const w = panel.square ? Math.min((width - left) / columns, 44) : (width - left) / columns;
  if (panel.title) group.append(label(fit(panel.title, width, 13, 600), 0, 14, "strong"));
  const widest = panel.square ? Math.max(...panel.values.flat().map((v) => textWidth(say(v), 11))) : Infinity;
  const font = [11, 9, 7].find((s) => (widest * s) / 11 < w - 2 && h > s + 3);
  const gap = w > 8 && h > 8 ? 1 : 0;
  panel.values.forEach((row, i) => row.forEach((value, j) => {
    const shade = panel.shades[i][j] ?? 0;
    const tip = `${panel.row_label} ${panel.row_names[i]}, ${panel.column_label} ${panel.column_names[j]}: ` +
      `${say(value)}${panel.unit}`;
    group.append(node("rect", {
      x: left + j * w, y: top + i * h, width: Math.max(0.5, w - gap), height: Math.max(0.5, h - gap),
      class: "cell", "fill-opacity": (0.04 + 0.96 * shade).toFixed(3), "data-tip": tip,
    }));
    if (font && value !== 0) {
      group.append(label(say(value), left + (j + 0.5) * w, top + (i + 0.5) * h + font * 0.36,
        `tick middle pass ${shade > 0.55 ? "inverse" : "plain"}`, { style: `font-size: ${font}px` }));
    }
  }));
  const everyRow = Math.ceil(13 / h);
  panel.row_names.forEach((name, i) => i % everyRow === 0 && group.append(
    label(fit(name, left - 26, 11), left - 7, top + (i + 0.5) * h + 4, "tick end")));
  const names = panel.column_names.map((name) => (panel.square ? fit(name, 64, 11) : name));
  const room = Math.max(...names.map((n) => textWidth(n, 11))) + 6;
  const turned = panel.square && room > w;
  const everyColumn = Math.ceil((turned ? 17 : room) / w);
  names.forEach((name, j) => {
    if (j % everyColumn) return;
    const [cx, cy] = [left + (j + 0.5) * w, top + rows * h + 14];
    const turn = turned ? { transform: `rotate(-35 ${cx} ${cy})` } : {};
    group.append(label(name, cx + (turned ? 4 : 0), cy, turned ? "tick end" : "tick middle", turn));
  });
  const middle = top + (rows * h) / 2;
  group.append(
    label(panel.column_label, left + columns * w, top + rows * h + (turned ? 60 : 32), "soft end"),
    label(fit(panel.row_label, rows * h), 10, middle, "soft middle", { transform: `rotate(-90 10 ${middle})` }),
  );
  return group;
}

/** Where the facts go: beside a wide drawing, below a narrow one. */
function arrowsLayout(panel, width) {
  const beside = width >= 640;
  const lines = beside ? 0 : Math.ceil(panel.notes.length / 2) * 20 + 14;
  return { beside, top: panel.title ? 26 : 6, below: 22 + lines, room: beside ? width * 0.62 : width };
}

function arrowsHeight(panel, width, bounds) {
  const { top, below, room } = arrowsLayout(panel, width);
  const [l, b, r, t] = bounds;
  return top + Math.min((room - 40) / (r - l), 320 / (t - b)) * (t - b) + below;
}

function drawArrows(panel, width, height, options) {
  const group = node("g");
  const { beside, top, below, room } = arrowsLayout(panel, width);
  const [l, b, r, t] = options.bounds || panel.bounds;
  const unit = Math.min((room - 40) / (r - l), (height - top - below) / (t - b));
  const x = (v) => (room - unit * (r - l)) / 2 + (v - l) * unit;
  const y = (v) => top + 8 + (t - v) * unit;
  if (panel.title) group.append(label(fit(panel.title, width, 13, 600), 0, 14, "strong"));
  if (panel.circle) group.append(node("circle", { cx: x(0), cy: y(0), r: panel.circle * unit, class: "clip-circle" }));
  panel.trail.forEach(([px, py], i) => group.append(node("circle", {
    cx: x(px), cy: y(py), r: 2.2, class: `trail c${panel.colour}`,
    "fill-opacity": (0.12 + 0.5 * (i / panel.trail.length)).toFixed(2),
  })));
  for (const a of panel.arrows) {
    group.append(arrow(x(a.start[0]), y(a.start[1]), x(a.end[0]), y(a.end[1]), a.role));
  }
  for (const a of panel.arrows) group.append(arrowLabel(a, x, y));
  group.append(node("circle", { cx: x(0), cy: y(0), r: 4, class: "origin" }));
  panel.notes.forEach(([name, value], i) => {
    const at = beside
      ? [room + 24, width, (height - panel.notes.length * 28) / 2 + 14 + i * 28]
      : [(i % 2) * (width / 2 + 8), (i % 2) * (width / 2 + 8) + width / 2 - 8, height - below + 34 + Math.floor(i / 2) * 20];
    group.append(label(fit(name, at[1] - at[0] - 40), at[0], at[2], "soft"), label(value, at[1], at[2], "fact end"));
    if (beside) group.append(node("line", { x1: at[0], x2: at[1], y1: at[2] + 9, y2: at[2] + 9, class: "grid" }));
  });
  return group;
}

function arrowLabel(a, x, y) {
  const [x0, y0, x1, y1] = [x(a.start[0]), y(a.start[1]), x(a.end[0]), y(a.end[1])];
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  if (a.side === "end") return label(a.label, x1 + ux * 10, y1 + uy * 14 + 4, `vector halo ${a.role} ${anchor(ux)}`);
  const sign = a.side === "left" ? 1 : -1; // seen along the arrow; y grows downwards on a screen
  const [nx, ny] = [uy * sign, -ux * sign];
  return label(a.label, (x0 + x1) / 2 + nx * 10, (y0 + y1) / 2 + ny * 14 + 4, `vector halo ${a.role} ${anchor(nx)}`);
}

function anchor(u) {
  return u > 0.35 ? "" : u < -0.35 ? "end" : "middle";
}
