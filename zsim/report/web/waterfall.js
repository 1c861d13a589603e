// Waterfall of memory: from the formula to what is needed, with the bands of need and capacity.

function waterfallWidget() {
  const box = section("waterfall", "From the formula to what is needed",
    "Each bar adds what the formula leaves out; dark bars are sums. Hatched: the band of what is " +
    "needed. The red zone: the least to the most that such a device has.");
  const drawing = element(box, "div", "", { class: "draw" });
  const below = element(box, "div");

  function draw() {
    const data = report.sides[chosenSide].waterfall;
    below.replaceChildren();
    if (!data) {
      drawing.replaceChildren();
      element(below, "p", "A saved Run has no formula: report on its scenario.");
      return;
    }
    const rows = 26, height = 28 + data.stages.length * rows;
    const [svg, width] = fresh(drawing, height, "Waterfall from the formula to the needed bytes");
    const left = width < 600 ? 146 : 170;
    let sum = 0;
    const bars = data.stages.map(stage => {
      const from = stage.total ? 0 : sum;
      sum = stage.total ? stage.nbytes : sum + stage.nbytes;
      return { stage, from: Math.min(from, sum), to: Math.max(from, sum) };
    });
    const most = Math.max(d3.max(bars, bar => bar.to), data.needed[2]);
    const near = data.capacity[0] < 2 * most;
    const x = d3.scaleLinear().domain([0, 1.04 * (near ? Math.max(most, data.capacity[2]) : most)])
      .range([left, width - 84]);
    if (near) {
      svg.append("rect").attr("x", x(data.capacity[1])).attr("y", 4)
        .attr("width", Math.max(1.5, x(data.capacity[2]) - x(data.capacity[1])))
        .attr("height", height - 28).style("fill", "var(--bad)").style("opacity", 0.35);
    }
    bars.forEach((bar, i) => {
      const y = 4 + i * rows, { stage } = bar;
      svg.append("text").attr("x", left - 8).attr("y", y + 15).attr("text-anchor", "end")
        .text(words(stage.name));
      svg.append("rect").attr("x", x(bar.from)).attr("y", y + 3).attr("height", rows - 8)
        .attr("width", Math.max(1, x(bar.to) - x(bar.from))).style("fill", stage.total
          ? "var(--accent)" : stage.nbytes < 0 ? "var(--good)" : "var(--forward)")
        .append("title").text(stage.reason);
      const last = i === bars.length - 1 ? data.needed[2] : 0;
      svg.append("text").attr("x", x(Math.max(bar.to, last)) + 6).attr("y", y + 15)
        .text((stage.nbytes < 0 ? "− " : "") + formatBytes(Math.abs(stage.nbytes)));
    });
    const y = 4 + (bars.length - 1) * rows + 5, [, low, high] = data.needed;
    const pattern = svg.append("defs").append("pattern").attr("id", "band").attr("width", 6)
      .attr("height", 6).attr("patternUnits", "userSpaceOnUse").attr("patternTransform", "rotate(45)");
    pattern.append("line").attr("y2", 6).style("stroke", "var(--ink)").style("stroke-width", 2);
    svg.append("rect").attr("x", x(low)).attr("y", y).attr("height", rows - 12)
      .attr("width", Math.max(1, x(high) - x(low))).attr("fill", "url(#band)");
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 22})`)
      .call(axisOf(x, d3.axisBottom, BYTES, Math.max(2, width / 130)));
    table(below, ["step", "bytes", "why"], data.stages.map(stage => [
      (stage.total ? "= " : "") + words(stage.name), formatBytes(stage.nbytes), stage.reason]), [1]);
    element(below, "p", `${data.verdict}: needs ${formatBytes(data.needed[0])} ` +
      `(${formatBytes(low)} to ${formatBytes(high)}) of ${formatBytes(data.capacity[0])}`);
  }
  drawn("waterfall", draw);
}
