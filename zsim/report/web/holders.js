// Who holds what: ranks × units × kinds at each stage, before and after each gather.

const BARS = [["parameters", "unsharded_parameters"], ["gradients", "unsharded_gradients"],
  ["optimizer_states"]];
const MOST_UNITS = 130;

function holdersWidget() {
  const box = section("holders", "Who holds what",
    "A row for each rank, a column for each unit. The three bars of a cell are parameters, " +
    "gradients and optimizer states, as parts of the most that any stage holds. Light: gathered " +
    "for a moment. Step through the changes to see each gather and each free.");
  const controls = element(box, "div", "", { class: "controls" });
  const label = element(controls, "label", "Stage ");
  const stages = element(label, "select", "", { id: "stage" });
  const slider = element(controls, "input", "", { type: "range", min: 0, step: 1, value: 0,
    "aria-label": "Change of the step" });
  button(controls, "◀", "Change before", () => moveTo(at - 1));
  button(controls, "▶", "Next change", () => moveTo(at + 1));
  button(controls, "Next gather", "Go to where parameters are gathered next", () => {
    const next = gathers().find(index => index > at);
    moveTo(next === undefined ? gathers()[0] || 0 : next);
  });
  const output = element(box, "div", "", { class: "output", "aria-live": "polite" });
  const drawing = element(box, "div", "", { class: "draw" });
  const canvas = element(drawing, "canvas", "", { tabindex: 0, role: "application",
    "aria-label": "Bytes that each rank holds of each unit; arrows go from cell to cell" });
  legend(box, ["parameters", "unsharded_parameters", "gradients", "unsharded_gradients",
    "optimizer_states"].map(kind => [words(kind), kind]));
  let at = 0, tables = [], shown = null, units = [], most = new Map(), cells = [], chosen = null;
  let unitsLeft = 0;

  // Each rank program's bytes by unit and kind after `index` changes of it.
  function held(program, index) {
    const state = new Map(), sums = [...program.start];
    for (const point of program.points.slice(0, index)) {
      for (let i = 1; i < point.length; i += 2) sums[point[i]] += point[i + 1];
    }
    sums.forEach((nbytes, owner) => {
      const [kind, unit] = program.owners[owner];
      if (nbytes) state.set(`${kind} ${unit}`, nbytes);
    });
    return state;
  }

  function prepare() {
    tables = report.sides[chosenSide].holders || [];
    shown = report.sides[chosenSide];
    stages.replaceChildren();
    tables.forEach((stage, i) => element(stages, "option", stage.name, { value: i }));
    const order = [], largest = new Map();
    for (const stage of tables) for (const program of stage.programs) {
      const sums = new Map();
      for (const [unit, kind, nbytes] of program.highest) {
        const bar = BARS.findIndex(kinds => kinds.includes(kind)), key = `${bar} ${unit}`;
        if (!order.includes(unit)) order.push(unit);
        sums.set(key, (sums.get(key) || 0) + nbytes);
      }
      for (const [key, sum] of sums) largest.set(key, Math.max(sum, largest.get(key) || 0));
    }
    units = order.slice(0, MOST_UNITS);
    unitsLeft = order.length - units.length;
    most = largest;
    at = 0;
    chosen = null;
  }

  // Changes after which the first rank holds more gathered parameters than before.
  function gathers() {
    const { owners, points } = stage().programs[0];
    return points.flatMap((point, i) => point.some((value, at) => at % 2 && value >= 0 &&
      owners[value][0] === "unsharded_parameters" && point[at + 1] > 0) ? [i + 1] : []);
  }

  const stage = () => tables[Number(stages.value) || 0];
  function moveTo(index) {
    at = Math.max(0, Math.min(Number(slider.max), index));
    slider.value = at;
    draw();
  }
  slider.addEventListener("input", () => moveTo(Number(slider.value)));
  stages.addEventListener("change", () => { at = 0; chosen = null; draw(); });

  function draw() {
    if (shown !== report.sides[chosenSide]) prepare();
    if (!tables.length) {
      sharp(canvas, 1);
      output.textContent = "A saved Run has no Program: report on its scenario.";
      return;
    }
    const now = stage(), first = now.programs[0];
    slider.max = d3.max(now.programs, program => program.points.length);
    slider.value = at;
    const rowHeight = 40, left = 78, height = 26 + now.ranks.length * rowHeight;
    const [context, width] = sharp(canvas, height);
    const wide = (width - left) / units.length;
    cells = [];
    context.fillStyle = colour("faint");
    units.forEach((unit, i) => {
      const room = Math.floor(wide / 6.6), short = unit.length > room ? unit.replace(/^.*\./, "") : unit;
      if (short.length <= room + 1 || i % Math.ceil(44 / wide) === 0) context.fillText(
        short.slice(0, Math.max(7, room)), left + i * wide, 10);
    });
    for (const [number, [rank, program, place, size]] of now.ranks.entries()) {
      const y = 22 + number * rowHeight, state = held(now.programs[program], at);
      context.fillStyle = colour("ink");
      context.fillText(`rank ${rank}`, 2, y + rowHeight / 2);
      units.forEach((unit, i) => cell(context, unit, state, place, size, left + i * wide, y,
        wide - Math.min(3, wide / 5), rowHeight - 6, rank));
    }
    const point = at ? first.points[at - 1] : null;
    const sum = d3.sum([...held(first, at).values()]);
    const freed = ![...held(first, 0).keys()].some(key => key.startsWith("gradients "));
    const rest = `between two steps${freed ? ", gradients freed" : ""}`;
    output.textContent = `${now.name}, ${now.formula}: ` +
      `${point ? first.labels[point[0]] : rest} (${at} of ${slider.max}), rank ` +
      `${now.ranks[0][0]} holds ${formatBytes(sum)} of these` +
      (now.left_out ? `; ${now.left_out} are not drawn` : "") +
      (unitsLeft ? `; and ${unitsLeft} more units` : "");
    if (chosen !== null) {
      const { x, y, width: w, height: h, text } = cells[chosen];
      context.strokeStyle = colour("accent");
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, w + 2, h + 2);
      output.textContent = text.replaceAll("\n", ", ");
    }
    slider.setAttribute("aria-valuetext", output.textContent);
  }

  function cell(context, unit, state, place, size, x, y, width, height, rank) {
    const bar = width / 3, lines = [`rank ${rank}, ${unit}`];
    context.fillStyle = colour("panel");
    context.fillRect(x, y, width, height);
    BARS.forEach((kinds, i) => {
      const whole = most.get(`${i} ${unit}`) || 1;
      kinds.forEach((kind, light) => {
        const nbytes = state.get(`${kind} ${unit}`) || 0;
        if (!nbytes) return;
        const part = Math.min(1, nbytes / whole);
        // a shard lies where its rank's part of the whole is; what is gathered fills the bar
        const from = light || part > 0.7 ? 0 : Math.min(1 - part, place / size);
        context.fillStyle = colour(kind);
        context.fillRect(x + i * bar, y + height * (1 - from - part), Math.max(0.7, bar - 0.7),
          Math.max(1.2, height * part));
        lines.push(`${words(kind)} ${formatBytes(nbytes)}`);
      });
    });
    cells.push({ x, y, width, height, text: lines.join("\n") });
  }

  canvas.addEventListener("pointermove", event => {
    const place = canvas.getBoundingClientRect();
    const x = event.clientX - place.left, y = event.clientY - place.top;
    const cellAt = cells.find(each => x >= each.x && x < each.x + each.width && y >= each.y &&
      y < each.y + each.height);
    tip(event, cellAt ? cellAt.text : "");
  });
  canvas.addEventListener("pointerleave", event => tip(event, ""));
  canvas.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -units.length, ArrowDown: units.length };
    if (!(event.key in by) || !cells.length) return;
    event.preventDefault();
    const next = chosen === null ? 0 : chosen + by[event.key];
    if (next >= 0 && next < cells.length) { chosen = next; draw(); }
  });
  drawn("holders", draw);
}
