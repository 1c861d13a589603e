// Timeline: rows of spans by side, rank and stream; zoom, pan, hover, exposed time, critical path.

const ROW = 20, GAP = 14, FIRST_RANKS = 4;
const [START, END, WHAT, EXPOSED, REASON, CRITICAL, COUNT] = [0, 1, 2, 3, 4, 5, 6];

function timelineWidget() {
  const data = report.timeline;
  const box = section("timeline", "Timeline of the step",
    "A row for each stream of a rank. Red hatching: communication runs and compute waits for it. " +
    "Outlined and joined: the critical path. Focus the drawing for the keys: arrows pan and change " +
    "the row, + and − zoom, 0 shows all, n and p go from span to span.");
  if (!data.ranks.length) { element(box, "p", "No side has spans."); return; }
  const state = { view: [0, data.end_ns], row: 0, span: null, all: false };
  const controls = element(box, "div", "", { class: "controls" });
  const drawing = element(box, "div", "", { class: "draw" });
  const canvas = element(drawing, "canvas", "", { tabindex: 0, role: "application",
    "aria-label": "Timeline of the step; the keys are told above" });
  const output = element(box, "div", "", { class: "output", "aria-live": "polite" });
  output.textContent = "Point at a span, or choose one with the keys.";
  legend(box, [...KINDS.map(kind => [words(kind), kind]), ["exposed", "bad"]]);
  const notes = [];
  if (data.merged_below_ns) notes.push(`Neighbours shorter than ${formatTime(data.merged_below_ns)} are one span.`);
  if (data.ranks_left_out) notes.push(`${data.ranks_left_out} more ranks are not in this file.`);
  if (notes.length) element(box, "p", notes.join(" "), { class: "note" });

  let rows = [], scale = d3.scaleLinear(), left = 120;

  function layOut() {
    rows = [];
    let y = 24;
    const seen = new Map();
    for (const rank of data.ranks) {
      const number = seen.get(rank.side) || 0;
      seen.set(rank.side, number + 1);
      if (!state.all && number >= FIRST_RANKS) continue;
      const first = rows.length, several = report.sides.length > 1;
      rank.top = y + 6;
      rank.title = (several ? `${report.sides[rank.side].name}: ` : "") + rank.label;
      y += GAP + 4;
      for (const track of rank.tracks) { rows.push({ rank, track, y, first }); y += ROW; }
    }
    return y + 6;
  }

  function draw() {
    const height = layOut();
    const [context, width] = sharp(canvas, height);
    left = width < 600 ? 76 : 150;
    scale = d3.scaleLinear().domain(state.view).range([left, width - 8]);
    const [from, to] = state.view;
    context.fillStyle = colour("faint");
    context.strokeStyle = colour("line");
    const axis = axisOf(scale, d3.axisTop, TIMES, Math.max(2, width / 140));
    for (const tick of axis.tickValues()) {
      const x = scale(tick);
      context.fillText(axis.tickFormat()(tick), x + 3, 10);
      context.beginPath(); context.moveTo(x, 4); context.lineTo(x, height); context.stroke();
    }
    context.save();
    context.beginPath(); context.rect(left, 0, width, height); context.clip();
    for (const side of report.sides) {
      if (!side.band_ns) continue;
      const [low, high] = side.band_ns.map(scale);
      context.globalAlpha = 0.13; context.fillStyle = colour("accent");
      context.fillRect(low, 18, Math.max(1, high - low), height - 18);
      context.globalAlpha = 1;
    }
    context.restore();
    for (const row of rows) {
      context.fillStyle = colour("ink");
      if (row.track === row.rank.tracks[0]) context.fillText(row.rank.title, 2, row.rank.top + 5);
      context.fillStyle = colour(row === rows[state.row] ? "accent" : "faint");
      context.fillText(words(row.track.stream).slice(0, left / 7), 8, row.y + ROW / 2);
      context.save();
      context.beginPath(); context.rect(left, 0, width, height); context.clip();
      spans(context, row, from, to);
      if (row.track.stream === "compute") {
        for (const [start, end] of row.rank.exposed) {
          if (end < from || start > to) continue;
          const x = scale(start);
          hatched(context, x, row.y + 2, Math.max(0.6, scale(end) - x), ROW - 5, colour("bad"));
        }
      }
      context.restore();
    }
    context.save();
    context.beginPath(); context.rect(left, 0, width, height); context.clip();
    for (const row of rows) if (row.track === row.rank.tracks[0]) path(context, row);
    if (state.span) outline(context, state.span, rows[state.row], colour("accent"), 3);
    context.restore();
  }

  function spans(context, row, from, to) {
    let lastX = -1;
    for (const span of row.track.spans) {
      if (span[END] < from || span[START] > to) continue;
      const x = scale(span[START]), w = scale(span[END]) - x;
      if (w < 0.4 && x - lastX < 0.4) continue;
      lastX = x;
      const kind = data.what[span[WHAT]][0];
      context.fillStyle = kindColour(kind);
      context.fillRect(x, row.y + 2, Math.max(0.6, w - (w > 3 ? 0.6 : 0)), ROW - 5);
      if (span[EXPOSED]) {
        context.fillStyle = colour("bad");
        context.fillRect(x, row.y + ROW - 6, Math.max(0.6, w), 3);
      }
      if (span[CRITICAL] && w > 1.5) outline(context, span, row, colour("critical"), 1.2);
      if (w > 24) {
        context.fillStyle = "#ffffff";
        const room = Math.floor((Math.min(w, scale(to) - x) - 6) / 6.6);
        const whole = data.what[span[WHAT]][1] || kind;
        const text = whole.length > room ? whole.replace(/^.*\./, ".") : whole;
        if (room > 1) context.fillText(text.length > room ? `${text.slice(0, room - 1)}…` : text,
          Math.max(x, left) + 3, row.y + ROW / 2 - 1);
      }
    }
  }

  function outline(context, span, row, ink, width) {
    context.strokeStyle = ink; context.lineWidth = width;
    const x = scale(span[START]);
    context.strokeRect(x, row.y + 2, Math.max(1, scale(span[END]) - x), ROW - 5);
  }

  function path(context, row) {
    context.strokeStyle = colour("critical"); context.lineWidth = 1; context.globalAlpha = 0.75;
    context.beginPath();
    row.rank.path.forEach(([track, start, end], i) => {
      const y = row.y + track * ROW + ROW / 2;
      if (i) context.lineTo(scale(start), y); else context.moveTo(scale(start), y);
      context.moveTo(scale(end), y);
    });
    context.stroke(); context.globalAlpha = 1;
  }

  function told(span, row) {
    const [kind, unit, nbytes, group] = data.what[span[WHAT]];
    const lines = [`${span[COUNT] > 1 ? `${span[COUNT]} spans from ` : ""}${words(kind)} ${unit} · ` +
      `${row.rank.label}, ${words(row.track.stream)}`,
      `${formatTime(span[START])} to ${formatTime(span[END])}, ${formatTime(span[END] - span[START])}` +
      (group ? `, ${formatBytes(nbytes)} over ${group}` : "")];
    if (span[EXPOSED]) lines.push(`${formatTime(span[EXPOSED])} exposed` +
      (data.reasons[span[REASON]] ? `: ${data.reasons[span[REASON]]}` : ""));
    if (span[CRITICAL]) lines.push("on the critical path");
    return lines.join("\n");
  }

  function zoom(factor, at = (state.view[0] + state.view[1]) / 2) {
    const [a, b] = state.view, most = data.end_ns * 1.02;
    let from = at - (at - a) * factor, to = at + (b - at) * factor;
    if (to - from < 10) return;
    if (to - from >= most) { from = 0; to = data.end_ns; }
    move(from, to);
  }

  function move(from, to) {
    const length = to - from;
    const start = Math.max(-0.01 * data.end_ns, Math.min(from, data.end_ns * 1.02 - length));
    state.view = [start, start + length];
    draw();
  }

  const pan = part => { const [a, b] = state.view, by = (b - a) * part; move(a + by, b + by); };
  const whole = () => { state.view = [0, data.end_ns]; draw(); };
  button(controls, "+", "Zoom in", () => zoom(0.5));
  button(controls, "−", "Zoom out", () => zoom(2));
  button(controls, "◀", "Earlier", () => pan(-0.3));
  button(controls, "▶", "Later", () => pan(0.3));
  button(controls, "Whole step", "Show the whole step", whole);
  if (data.ranks.length > FIRST_RANKS) {
    const more = button(controls, `All ${data.ranks.length} ranks`, "Show all ranks", () => {
      state.all = !state.all; state.row = 0; state.span = null;
      more.textContent = state.all ? "Fewer ranks" : `All ${data.ranks.length} ranks`;
      draw();
    });
  }

  function at(event) {
    const place = canvas.getBoundingClientRect();
    const x = event.clientX - place.left, y = event.clientY - place.top;
    const row = rows.findIndex(each => y >= each.y && y < each.y + ROW);
    if (row < 0 || x < left) return [row, null];
    const ns = scale.invert(x), slack = scale.invert(x + 1) - ns, list = rows[row].track.spans;
    const index = d3.bisector(span => span[END]).left(list, ns - slack);
    const span = list[index];
    return [row, span && span[START] <= ns + slack ? span : null];
  }

  let drag = null;
  canvas.addEventListener("pointerdown", event => {
    drag = { x: event.clientX, view: state.view };
    const [row, span] = at(event);
    if (row >= 0) { state.row = row; state.span = span; }
    if (span) output.textContent = told(span, rows[row]);
    draw();
  });
  window.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) {
      const by = scale.invert(drag.x) - scale.invert(event.clientX);
      state.view = drag.view; scale.domain(drag.view);
      move(drag.view[0] + by, drag.view[1] + by);
      return;
    }
    const [row, span] = at(event);
    tip(event, span ? told(span, rows[row]) : "");
  });
  canvas.addEventListener("pointerleave", event => tip(event, ""));
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const place = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, scale.invert(event.clientX - place.left));
  }, { passive: false });

  function step(by) {
    const list = rows[state.row].track.spans;
    const now = state.span ? list.indexOf(state.span) : -1;
    const first = list.findIndex(span => span[END] > state.view[0]);
    const next = now < 0 ? Math.max(0, first) : Math.max(0, Math.min(list.length - 1, now + by));
    state.span = list[next];
    output.textContent = told(state.span, rows[state.row]);
    const [a, b] = state.view, length = b - a;
    if (state.span[START] < a || state.span[START] > b) move(state.span[START] - length / 4,
      state.span[START] + 3 * length / 4);
    else draw();
  }

  function change(by) {
    state.row = Math.max(0, Math.min(rows.length - 1, state.row + by));
    state.span = null;
    output.textContent = `${rows[state.row].rank.title}, ${words(rows[state.row].track.stream)}`;
    draw();
  }

  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": whole,
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => change(-1),
    ArrowDown: () => change(1), n: () => step(1), p: () => step(-1) };
  canvas.addEventListener("keydown", event => {
    const act = keys[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
  });
  drawn("timeline", draw);
}
