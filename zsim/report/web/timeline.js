// Timeline: rows of spans by side, rank and stream; zoom, pan, hover, exposed time, critical path.

const FIRST_RANKS = 4;
const OWN_AXIS = 3;

function timelineWidget() {
  const data = report.timeline;
  const box = section("timeline", "Timeline of the step",
    "A row for each stream of a rank. Red hatching: communication runs and compute waits for it. " +
    "Outlined and joined: the critical path. Focus the drawing for the keys: arrows pan and change " +
    "the row, + and − zoom, 0 shows all, n and p go from span to span. Ctrl and the wheel zoom, " +
    "too; drag to pan.");
  if (!data.ranks.length) { element(box, "p", "No side has spans."); return; }
  const bands = report.sides.map(side => side.band_ns ? side.band_ns[1] : 0);
  const end = Math.max(data.end_ns, Math.min(d3.max(bands), 1.4 * data.end_ns));
  // A side much shorter than the longest has an axis of its own: its times are stretched.
  const ends = new Map();
  for (const rank of data.ranks) for (const track of rank.tracks) {
    const last = d3.max(track.spans, span => span[END]) || 0;
    ends.set(rank.side, Math.max(last, ends.get(rank.side) || 1));
  }
  const longest = d3.max([...ends.values()]);
  report.sides.forEach((side, i) => {
    side.stretch = ends.get(i) < longest / OWN_AXIS ? longest / ends.get(i) : 1;
  });
  const state = { view: [0, end], row: 0, span: null, all: false };
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
      const { name, stretch } = report.sides[rank.side];
      rank.title = (several ? `${name}: ` : "") + rank.label + (stretch > 1
        ? `, on an axis of its own to ${formatTime(Math.round(end / stretch))}` : "");
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
    for (const row of rows) {
      const { stretch } = report.sides[row.rank.side];
      row.scale = scale.copy().domain(state.view.map(ns => ns / stretch));
    }
    drawTimeline(context, { scale, rows, left, width, height, chosen: rows[state.row],
      span: state.span });
  }

  function zoom(factor, at = (state.view[0] + state.view[1]) / 2) {
    const [a, b] = state.view, most = end * 1.02;
    let from = at - (at - a) * factor, to = at + (b - at) * factor;
    if (to - from < 10) return;
    if (to - from >= most) { from = 0; to = end; }
    move(from, to);
  }

  function move(from, to) {
    const length = to - from;
    const start = Math.max(-0.01 * end, Math.min(from, end * 1.02 - length));
    state.view = [start, start + length];
    draw();
  }

  const pan = part => { const [a, b] = state.view, by = (b - a) * part; move(a + by, b + by); };
  const whole = () => { state.view = [0, end]; draw(); };
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
    const own = rows[row].scale, ns = own.invert(x), slack = own.invert(x + 1) - ns;
    const list = rows[row].track.spans;
    const index = d3.bisector(span => span[END]).left(list, ns - slack);
    const span = list[index];
    return [row, span && span[START] <= ns + slack ? span : null];
  }

  let drag = null;
  canvas.addEventListener("pointerdown", event => {
    drag = { x: event.clientX, view: state.view };
    const [row, span] = at(event);
    if (row >= 0) { state.row = row; state.span = span; }
    if (span) output.textContent = toldOf(span, rows[row]);
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
    tip(event, span ? toldOf(span, rows[row]) : "");
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
    const { stretch } = report.sides[rows[state.row].rank.side];
    const first = list.findIndex(span => span[END] * stretch > state.view[0]);
    const next = now < 0 ? Math.max(0, first) : Math.max(0, Math.min(list.length - 1, now + by));
    state.span = list[next];
    output.textContent = toldOf(state.span, rows[state.row]);
    const [a, b] = state.view, length = b - a, start = state.span[START] * stretch;
    if (start < a || start > b) move(start - length / 4, start + 3 * length / 4);
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
