// Drawing of the timeline: its axis and bands, spans, exposed stretches and the critical path.

const ROW = 20, GAP = 14;
const [START, END, WHAT, EXPOSED, REASON, CRITICAL, COUNT] = [0, 1, 2, 3, 4, 5, 6];

// All rows of `chart`: a scale of ns, rows with their y, the left edge, sizes, and what is chosen.
function drawTimeline(context, chart) {
  const { rows, left, width, height } = chart;
  drawAxis(context, chart);
  for (const row of rows) {
    context.fillStyle = colour("ink");
    if (row.track === row.rank.tracks[0]) context.fillText(row.rank.title, 2, row.rank.top + 5);
    context.fillStyle = colour(row === chart.chosen ? "accent" : "faint");
    context.fillText(words(row.track.stream).slice(0, left / 7), 8, row.y + ROW / 2);
  }
  context.save();
  context.beginPath();
  context.rect(left, 0, width, height);
  context.clip();
  drawBands(context, chart);
  for (const row of rows) {
    drawSpans(context, chart, row);
    if (row.track.stream === "compute") drawExposed(context, row);
  }
  for (const row of rows) if (row.track === row.rank.tracks[0]) drawPath(context, row);
  if (chart.span) outline(context, chart.span, chart.chosen, colour("accent"), 3);
  context.restore();
}

function drawAxis(context, { scale, width, height }) {
  context.fillStyle = colour("faint");
  context.strokeStyle = colour("line");
  const axis = axisOf(scale, d3.axisTop, TIMES, Math.max(2, width / 140));
  for (const tick of axis.tickValues()) {
    const x = scale(tick);
    context.fillText(axis.tickFormat()(tick), x + 3, 10);
    context.beginPath();
    context.moveTo(x, 4);
    context.lineTo(x, height);
    context.stroke();
  }
}

function drawBands(context, { scale, height }) {
  context.globalAlpha = 0.13;
  context.fillStyle = colour("accent");
  for (const side of report.sides) {
    if (!side.band_ns || side.stretch > 1) continue;
    const [low, high] = side.band_ns.map(scale);
    context.fillRect(low, 18, Math.max(1, high - low), height - 18);
  }
  context.globalAlpha = 1;
}

function drawSpans(context, chart, row) {
  const { left } = chart, { scale } = row, [from, to] = scale.domain();
  let lastX = -1;
  for (const span of row.track.spans) {
    if (span[END] < from || span[START] > to) continue;
    const x = scale(span[START]), w = scale(span[END]) - x;
    if (w < 0.4 && x - lastX < 0.4) continue;  // on the pixel of the one before
    lastX = x;
    const [kind, unit] = report.timeline.what[span[WHAT]];
    context.fillStyle = kindColour(kind);
    context.fillRect(x, row.y + 2, Math.max(0.6, w - (w > 3 ? 0.6 : 0)), ROW - 5);
    if (span[EXPOSED]) {
      context.fillStyle = colour("bad");
      context.fillRect(x, row.y + ROW - 6, Math.max(0.6, w), 3);
    }
    if (span[CRITICAL] && w > 1.5) outline(context, span, row, colour("critical"), 1.2);
    if (w < 24) continue;
    context.fillStyle = "#ffffff";
    const room = Math.floor((Math.min(w, scale(to) - x) - 6) / 6.6), whole = unit || kind;
    const text = whole.length > room ? whole.replace(/^.*\./, ".") : whole;
    if (room > 1) context.fillText(text.length > room ? `${text.slice(0, room - 1)}…` : text,
      Math.max(x, left) + 3, row.y + ROW / 2 - 1);
  }
}

function drawExposed(context, row) {
  const { scale } = row;
  const [from, to] = scale.domain();
  for (const [start, end] of row.rank.exposed) {
    if (end < from || start > to) continue;
    const x = scale(start);
    hatched(context, x, row.y + 2, Math.max(0.6, scale(end) - x), ROW - 5, colour("bad"));
  }
}

function drawPath(context, row) {
  const { scale } = row;
  context.strokeStyle = colour("critical");
  context.lineWidth = 1;
  context.globalAlpha = 0.75;
  context.beginPath();
  row.rank.path.forEach(([track, start, end], i) => {
    const y = row.y + track * ROW + ROW / 2;
    if (i) context.lineTo(scale(start), y); else context.moveTo(scale(start), y);
    context.moveTo(scale(end), y);
  });
  context.stroke();
  context.globalAlpha = 1;
}

function outline(context, span, row, ink, width) {
  const { scale } = row;
  context.strokeStyle = ink;
  context.lineWidth = width;
  const x = scale(span[START]);
  context.strokeRect(x, row.y + 2, Math.max(1, scale(span[END]) - x), ROW - 5);
}

// A span in words: what, when, how long, how much, and why it is exposed.
function toldOf(span, row) {
  const { what, reasons } = report.timeline;
  const [kind, unit, nbytes, group] = what[span[WHAT]];
  const several = span[COUNT] > 1 ? `${span[COUNT]} spans from ` : "";
  const lines = [
    `${several}${words(kind)} ${unit} · ${row.rank.label}, ${words(row.track.stream)}`,
    `${formatTime(span[START])} to ${formatTime(span[END])}, ` +
      formatTime(span[END] - span[START]) + (group ? `, ${formatBytes(nbytes)} over ${group}` : ""),
  ];
  if (span[EXPOSED]) lines.push(`${formatTime(span[EXPOSED])} exposed` +
    (reasons[span[REASON]] ? `: ${reasons[span[REASON]]}` : ""));
  if (span[CRITICAL]) lines.push("on the critical path");
  return lines.join("\n");
}
