// Memory over the step, stacked by kind; a slider tells who holds what at each moment.

const MOST_OWNERS = 14;

// Bytes by kind at the start and at each point, and where the total is highest.
function memoryStates(data) {
  const kind = data.owners.map(([name]) => data.kinds.indexOf(name));
  const now = data.kinds.map(() => 0);
  data.start.forEach((nbytes, owner) => { now[kind[owner]] += nbytes; });
  const states = [[...now]];
  for (const point of data.points) {
    for (let i = 2; i < point.length; i += 2) now[kind[point[i]]] += point[i + 1];
    states.push([...now]);
  }
  const totals = states.map(state => d3.sum(state));
  return { states, totals, peak: totals.indexOf(d3.max(totals)) };
}

function heldAt(data, index) {
  const held = [...data.start];
  for (let at = 0; at < index; at++) {
    const point = data.points[at];
    for (let i = 2; i < point.length; i += 2) held[point[i]] += point[i + 1];
  }
  return held;
}

// Rows of kind, units and bytes, the largest first; units that hold as much of a kind share one.
function byOwner(data, index) {
  const groups = new Map();
  heldAt(data, index).forEach((nbytes, owner) => {
    if (!nbytes) return;
    const [kind, unit] = data.owners[owner], key = `${kind} ${nbytes}`;
    if (!groups.has(key)) groups.set(key, { kind, nbytes, units: [] });
    groups.get(key).units.push(unit);
  });
  return [...groups.values()]
    .sort((a, b) => b.nbytes * b.units.length - a.nbytes * a.units.length);
}

function memoryWidget() {
  const box = section("memory", "Memory over the step",
    "Bytes that torch has allocated, in the order in which the host issues ops. Move the slider: " +
    "the table says who holds what at that moment. Dashed: the total of another side.");
  const controls = element(box, "div", "", { class: "controls" });
  const slider = element(controls, "input", "", { type: "range", min: 0, step: 1,
    "aria-label": "Moment of the step" });
  let at = 0, data = null, found = null, shown = null;
  button(controls, "To the peak", "Go to the peak", () => moveTo(found ? found.peak : 0));
  const output = element(box, "div", "", { class: "output", "aria-live": "polite" });
  const drawing = element(box, "div", "", { class: "draw" });
  const keys = element(box, "div");
  const holders = element(box, "div");
  let cursor = null, scale = null;

  function moveTo(index) { at = index; slider.value = at; tell(); }
  slider.addEventListener("input", () => { at = Number(slider.value); tell(); });

  function tell() {
    if (!data) return;
    const point = at ? data.points[at - 1] : null;
    output.textContent = `${point ? data.labels[point[0]] : "before the first op"}: ` +
      `${formatBytes(found.totals[at])} on rank ${data.rank}` +
      (at === found.peak ? ", the peak" : `, ${formatBytes(found.totals[found.peak])} at the peak`) +
      (point && point[1] ? `\nissued by the host after ${formatTime(point[1])}` : "");
    slider.setAttribute("aria-valuetext", output.textContent);
    if (cursor) cursor.attr("x1", scale(at)).attr("x2", scale(at));
    holders.replaceChildren();
    const rows = byOwner(data, at);
    table(holders, ["kind", "who", "bytes"], rows.slice(0, MOST_OWNERS).map(each => [
      words(each.kind), each.units[0] + (each.units.length > 1
        ? ` and ${each.units.length - 1} like it` : ""),
      formatBytes(each.nbytes * each.units.length)]), [2]);
    if (rows.length > MOST_OWNERS) element(holders, "p", `and ${rows.length - MOST_OWNERS} more, ` +
      formatBytes(d3.sum(rows.slice(MOST_OWNERS), each => each.nbytes * each.units.length)),
      { class: "note" });
  }

  function draw() {
    const side = report.sides[chosenSide];
    if (side.memory !== shown) {
      data = shown = side.memory;
      found = data && memoryStates(data);
      at = found ? found.peak : 0;
    }
    keys.replaceChildren();
    if (!data) {
      drawing.replaceChildren(); holders.replaceChildren(); cursor = null;
      output.textContent = "This side has no bytes op by op.";
      return;
    }
    slider.max = data.points.length;
    slider.value = at;
    const [svg, width] = fresh(drawing, 260, "Allocated bytes over the step, by kind");
    const x = scale = d3.scaleLinear().domain([0, Math.max(1, data.points.length)])
      .range([72, width - 10]);
    const highest = d3.max(found.totals), near = data.capacity_bytes < 1.6 * highest;
    const y = d3.scaleLinear().domain([0, 1.05 * (near
      ? Math.max(highest, data.capacity_bytes) : highest)]).range([236, 10]);
    const stack = d3.stack().keys(d3.range(data.kinds.length)).value((state, key) => state[key]);
    const area = d3.area().x((_, i) => x(i)).y0(d => y(d[0])).y1(d => y(d[1]))
      .curve(d3.curveStepAfter);
    for (const series of stack(found.states)) {
      svg.append("path").attr("d", area(series)).style("fill", `var(--${data.kinds[series.key]})`);
    }
    for (const other of report.sides) {
      if (other === side || !other.memory || other.memory.by_part || data.by_part) continue;
      const totals = memoryStates(other.memory).totals;
      const wide = d3.scaleLinear().domain([0, totals.length - 1]).range(x.range());
      svg.append("path").attr("d", d3.line().x((_, i) => wide(i)).y(d => y(d))
        .curve(d3.curveStepAfter)(totals)).style("fill", "none").style("stroke", "var(--ink)")
        .style("stroke-dasharray", "4 3");
    }
    if (data.capacity_bytes && near) {
      const line = y(data.capacity_bytes);
      svg.append("line").attr("x1", 72).attr("x2", width - 10).attr("y1", line).attr("y2", line)
        .style("stroke", "var(--bad)").style("stroke-dasharray", "6 3");
      svg.append("text").attr("x", 78).attr("y", line + 14).text("the device's capacity");
    }
    svg.append("g").attr("class", "axis").attr("transform", "translate(72,0)")
      .call(axisOf(y, d3.axisLeft, BYTES, 5));
    svg.append("text").attr("class", "faint").attr("x", 72).attr("y", 254)
      .text(data.by_part ? "start and peak of each part" : "first op issued → last op issued");
    cursor = svg.append("line").attr("y1", 6).attr("y2", 240).style("stroke", "var(--ink)")
      .style("stroke-width", 1.5);
    svg.node().addEventListener("click", event => moveTo(Math.max(0, Math.min(data.points.length,
      Math.round(x.invert(event.offsetX))))));
    legend(keys, data.kinds.map(kind => [words(kind), kind]));
    tell();
  }
  drawn("memory", draw);
}
