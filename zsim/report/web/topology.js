// Topology: devices, switches, NICs and rails; a link is as thick as its traffic is large.

function topologyWidget() {
  const box = section("topology", "Topology and traffic",
    "Bytes of one step over each link in its busier direction, as rings carry them. Choose a link " +
    "or a device; a device shows with whom it communicates.");
  const controls = element(box, "div", "", { class: "controls" });
  const label = element(controls, "label", "Same colour: one group of ");
  const axes = element(label, "select", "", { id: "axis" });
  const drawing = element(box, "div", "", { class: "draw" });
  const output = element(box, "div", "Choose a link or a device.",
    { class: "output", "aria-live": "polite" });
  const below = element(box, "div");
  let shown = null, data = null, chosen = null;
  axes.addEventListener("change", draw);

  // The devices of the same group: all coordinates equal but that of the axis.
  const peers = (part, axis) => data.parts.filter(other => other.coordinate &&
    other.coordinate.every((c, i) => i === axis || c === part.coordinate[i]));

  // The number of a device's group along the axis: its coordinates on the others.
  const groupOf = (part, axis) => part.coordinate.reduce((sum, c, i) =>
    i === axis ? sum : sum * data.axes[i][1] + c, 0);

  function tellLink(link) {
    const groups = Object.entries(link.by_group).map(([name, n]) => `${formatBytes(n)} over ${name}`);
    output.textContent = `${link.ends.join(" – ")}, ${link.kind}, ` +
      `${(link.bandwidth / 1e9).toFixed(1)} GB/s\n${formatBytes(link.bytes)} a step` +
      (groups.length ? `: ${groups.join(", ")}; busy ${(100 * link.busy).toFixed(1)} % of the step` : "");
  }

  function tellDevice(part) {
    chosen = part;
    const lines = data.axes.map(([name, size], axis) => size > 1
      ? `${name} ${part.coordinate[axis]}: with ${peers(part, axis).length} of ${size} drawn here` : "");
    output.textContent = [`rank ${part.rank}, ${part.name}`, ...lines].filter(Boolean).join("\n");
    draw();
  }

  function draw() {
    const side = report.sides[chosenSide];
    if (shown !== side) {
      shown = side; data = side.topology; chosen = null;
      axes.replaceChildren();
      (data ? data.axes : []).forEach(([name, size], i) =>
        element(axes, "option", `${name} (${size})`, { value: i }));
      if (data) axes.value = data.axes[1][1] > 1 ? 1 : 0;
    }
    below.replaceChildren();
    if (!data) {
      drawing.replaceChildren();
      output.textContent = "A saved Run has no cluster: report on its scenario.";
      return;
    }
    const [svg, width] = fresh(drawing, 330, "Devices and links with their traffic");
    const x = d3.scaleLinear().domain([0, d3.max(data.parts, part => part.x) +
      d3.min(data.parts, part => part.x)]).range([46, width]);
    const y = d3.scaleLinear().domain([-6, 114]).range([8, 300]);
    const thick = d3.scaleSqrt().domain([0, d3.max(data.links, link => link.bytes) || 1])
      .range([0.8, 9]);
    const places = new Map(data.parts.map(part => [part.name, part]));
    const axis = Number(axes.value), palette = d3.schemeTableau10 || d3.schemeCategory10;
    for (const link of data.links) {
      const [a, b] = link.ends.map(name => places.get(name));
      const line = svg.append("line").attr("x1", x(a.x)).attr("y1", y(a.y)).attr("x2", x(b.x))
        .attr("y2", y(b.y)).style("stroke-width", thick(link.bytes)).style("stroke",
          !link.bytes ? "var(--line)" : link.kind === "rail" ? "var(--all_gather)" : "var(--forward)");
      const hit = svg.append("line").attr("x1", x(a.x)).attr("y1", y(a.y)).attr("x2", x(b.x))
        .attr("y2", y(b.y)).style("stroke", "transparent").style("stroke-width", 10);
      if (!link.bytes) continue;
      hit.attr("tabindex", 0).attr("role", "button")
        .attr("aria-label", `${link.ends.join(" to ")}, ${formatBytes(link.bytes)}`);
      pressed(hit.node(), () => tellLink(link));
      hit.node().addEventListener("pointermove", event => tip(event,
        `${link.ends.join(" – ")}\n${formatBytes(link.bytes)} a step`));
      hit.node().addEventListener("pointerleave", event => tip(event, ""));
      line.style("stroke-opacity", 0.85);
    }
    const near = chosen ? new Set(data.axes.flatMap((_, i) => peers(chosen, i))) : null;
    const size = Math.max(4, Math.min(12, width / (2.6 * data.parts.filter(p => "rank" in p).length)));
    for (const part of data.parts) {
      const spot = svg.append("g").attr("transform", `translate(${x(part.x)},${y(part.y)})`);
      if ("rank" in part) {
        spot.append("circle").attr("r", size)
          .style("fill", palette[groupOf(part, axis) % palette.length])
          .style("stroke", near && near.has(part) ? "var(--critical)" : "var(--paper)")
          .style("stroke-width", near && near.has(part) ? 3 : 1);
        if (size > 7) spot.append("text").attr("text-anchor", "middle").attr("dy", "0.35em")
          .style("fill", "#ffffff").text(part.rank);
        spot.attr("tabindex", 0).attr("role", "button").attr("aria-label", `rank ${part.rank}`);
        pressed(spot.node(), () => tellDevice(part));
      } else {
        spot.append("rect").attr("x", -5).attr("y", -4).attr("width", 10).attr("height", 8)
          .style("fill", "var(--panel)").style("stroke", "var(--faint)");
        spot.append("title").text(part.name);
      }
    }
    for (const [kind, text] of [["switch", "switch"], ["device", "devices"], ["pcie", "PCIe"], ["host", "host"],
      ["nic", "NICs"], ["rail", "rails"]]) {
      const row = data.parts.find(part => part.kind === kind);
      if (row) svg.append("text").attr("class", "faint").attr("x", 0).attr("y", y(row.y) + 4).text(text);
    }
    tables();
  }

  function tables() {
    const busiest = data.links.filter(link => link.bytes).sort((a, b) => b.busy - a.busy);
    const kinds = [...new Set(busiest.map(link => link.kind))]
      .map(kind => busiest.filter(link => link.kind === kind));
    table(below, ["link", "number", "bytes of the busiest", "GB/s", "busy"], kinds.map(links => [
      links[0].kind, String(links.length), formatBytes(links[0].bytes),
      (links[0].bandwidth / 1e9).toFixed(1), `${(100 * links[0].busy).toFixed(1)} %`]),
    [1, 2, 3, 4]);
    if (data.algorithms.length) table(below, ["group", "collective", "algorithm", "number"],
      data.algorithms, [3]);
    if (data.left_out) element(below, "p", `${data.left_out}; they carry the same.`, { class: "note" });
  }
  drawn("topology", draw);
}
