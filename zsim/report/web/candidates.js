// Trade-off: each candidate by memory, communication and time, with its bands and the Pareto front.

const ACROSS = {
  memory: ["needed memory", c => c.needed[0]],
  sent: ["sent per rank", c => c.sent_bytes],
};
const STAGE_COLOURS = { ddp: "optimizer_states", zero1: "gradients", zero2: "communication",
  zero3: "parameters" };

function candidatesWidget() {
  const box = section("candidates", "Trade-off of the stages",
    "Every strategy and way of checkpointing on this cluster, planned and simulated. Bars are 90 % " +
    "bands. Filled: it fits. Joined: the Pareto front of what is drawn. Choose a point or a row for why.");
  const controls = element(box, "div", "", { class: "controls" });
  const across = element(element(controls, "label", "Across "), "select", "", { id: "across" });
  for (const key of ["memory", "sent"]) element(across, "option", ACROSS[key][0], { value: key });
  const drawing = element(box, "div", "", { class: "draw" });
  const output = element(box, "div", "", { class: "output", "aria-live": "polite" });
  legend(box, Object.entries(STAGE_COLOURS));
  const below = element(box, "div");
  let shown = null, data = null, chosen = null;
  across.addEventListener("change", draw);

  function choose(candidate) {
    chosen = candidate;
    draw();
  }

  function tell() {
    if (!chosen) { output.textContent = data.reason || ""; return; }
    const dropped = chosen.dropped.length ? `\nwithout ${chosen.dropped.join(", ")}` : "";
    output.textContent = `${chosen.name}: ${chosen.why}\n${formatTime(chosen.step_ns)} a step, ` +
      `${formatTime(chosen.exposed_ns)} exposed; sends ${formatBytes(chosen.sent_bytes)} per rank` + dropped;
  }

  function front(candidates, x) {
    const able = candidates.filter(c => c.verdict === "FITS")
      .sort((a, b) => x(a) - x(b) || a.step_ns - b.step_ns);
    const kept = [];
    for (const each of able) {
      if (!kept.length || each.step_ns < kept[kept.length - 1].step_ns) kept.push(each);
    }
    return kept;
  }

  function draw() {
    const side = report.sides[chosenSide];
    if (shown !== side) {
      shown = side; data = side.candidates;
      chosen = data ? data.candidates.find(c => c.name === data.recommended) || null : null;
    }
    below.replaceChildren();
    if (!data || !data.candidates.length) {
      drawing.replaceChildren();
      output.textContent = data ? data.reason : "A saved Run has no candidates: report on its scenario.";
      return;
    }
    const [svg, width] = fresh(drawing, 340, "Candidates by step time");
    const [name, value] = ACROSS[across.value], all = data.candidates;
    const capacity = across.value === "memory" ? d3.max(all, c => c.capacity) : 0;
    const x = d3.scaleLinear().domain([0, 1.06 * Math.max(capacity, d3.max(all, value))]).nice()
      .range([80, width - 16]);
    const y = d3.scaleLinear().domain([0, 1.05 * d3.max(all, c => c.band_ns[1])]).range([300, 10]);
    svg.append("g").attr("class", "axis").attr("transform", "translate(0,300)")
      .call(axisOf(x, d3.axisBottom, BYTES, Math.max(2, width / 130)));
    svg.append("g").attr("class", "axis").attr("transform", "translate(80,0)")
      .call(axisOf(y, d3.axisLeft, TIMES, 6));
    svg.append("text").attr("x", width - 16).attr("y", 336).attr("text-anchor", "end").text(name);
    if (capacity) {
      svg.append("line").attr("x1", x(capacity)).attr("x2", x(capacity)).attr("y1", 10)
        .attr("y2", 300).style("stroke", "var(--bad)").style("stroke-dasharray", "6 3");
      svg.append("text").attr("x", x(capacity) - 4).attr("y", 20).attr("text-anchor", "end")
        .text("capacity");
    }
    svg.append("path").attr("d", d3.line().x(c => x(value(c))).y(c => y(c.step_ns))
      .curve(d3.curveStepAfter)(front(all, value))).style("fill", "none")
      .style("stroke", "var(--good)").style("stroke-width", 2);
    for (const c of all) {
      const ink = `var(--${STAGE_COLOURS[c.stage]})`, spot = svg.append("g");
      const bar = (x1, y1, x2, y2) => spot.append("line").attr("x1", x1).attr("y1", y1)
        .attr("x2", x2).attr("y2", y2).style("stroke", ink).style("stroke-opacity", 0.45);
      bar(x(value(c)), y(c.band_ns[0]), x(value(c)), y(c.band_ns[1]));
      if (capacity) bar(x(c.needed[1]), y(c.step_ns), x(c.needed[2]), y(c.step_ns));
      spot.append("circle").attr("cx", x(value(c))).attr("cy", y(c.step_ns))
        .attr("r", c === chosen ? 9 : 6).style("stroke", c === chosen ? "var(--critical)" : ink)
        .style("stroke-width", 2).style("fill", c.verdict === "FITS" ? ink : "var(--paper)");
      spot.attr("tabindex", 0).attr("role", "button")
        .attr("aria-label", `${c.name}, ${c.verdict}, ${formatTime(c.step_ns)}`);
      pressed(spot.node(), () => choose(c));
      spot.node().addEventListener("pointermove", event => tip(event, `${c.name}\n${c.verdict}, ` +
        `${formatBytes(c.needed[0])}, ${formatTime(c.step_ns)}`));
      spot.node().addEventListener("pointerleave", event => tip(event, ""));
    }
    const body = table(below, ["candidate", "verdict", "needs", "sends", "exposed", "step", "front"],
      all.map(c => [c.name, c.verdict, formatBytes(c.needed[0]), formatBytes(c.sent_bytes),
        formatTime(c.exposed_ns), formatTime(c.step_ns), c.front ? "yes" : ""]), [2, 3, 4, 5]);
    [...body.children].forEach((row, i) => {
      row.setAttribute("tabindex", 0);
      if (all[i] === chosen) row.className = "chosen";
      pressed(row, () => choose(all[i]));
    });
    if (data.refused.length) table(below, ["cannot be", "reason"], data.refused);
    tell();
  }
  drawn("candidates", draw);
}
