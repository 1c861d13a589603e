// The page as a whole: head, sections, the choice of a side, colours, printing.

// A row for each figure, with a column for each side.
function factsSection() {
  const box = section("facts", "At a glance");
  const names = [...new Set(report.sides.flatMap(side => side.facts.map(([name]) => name)))];
  const cell = (side, name) => side.facts.filter(fact => fact[0] === name)
    .map(fact => fact[1]).join("; ");
  table(box, report.sides.length > 1 ? ["", ...report.sides.map(side => side.name)] : [],
    names.map(name => [name, ...report.sides.map(side => cell(side, name))]));
  if (report.checks.length) {
    element(box, "h3", "Predicted against measured");
    table(box, ["check", "status", "found"], report.checks);
  }
}

function assumedSection() {
  const box = section("assumed", "Constants and what is assumed",
    "Every constant of the cluster, also those that this step does not read, the least certain " +
    "first. Step times are 90 % bands; all rest on the same constants, so differences are more " +
    "certain than the times.");
  const below = element(box, "div");
  drawn("assumed", () => {
    below.replaceChildren();
    const rows = report.sides[chosenSide].assumed;
    if (rows) table(below, ["constant", "value", "known by", "source"], rows);
    else element(below, "p", "A saved Run names no constants: report on its scenario.");
  });
}

const THEMES = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
let theme = 0;
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  drawAll();
}

function start() {
  document.getElementById("title").textContent = report.sides.map(side => side.name).join(" · ");
  const sides = document.getElementById("side");
  report.sides.forEach((side, i) => element(sides, "option", side.name, { value: i }));
  document.getElementById("side-label").hidden = report.sides.length < 2;
  sides.addEventListener("change", () => { chosenSide = Number(sides.value); drawAll(); });
  const colours = document.getElementById("theme");
  colours.addEventListener("click", () => {
    theme = (theme + 1) % THEMES.length;
    colours.textContent = `Colours: ${THEMES[theme][1]}`;
    setTheme(THEMES[theme][0]);
  });
  factsSection();
  timelineWidget();
  memoryWidget();
  holdersWidget();
  topologyWidget();
  candidatesWidget();
  waterfallWidget();
  assumedSection();
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => setTheme("light"));
  window.addEventListener("afterprint", () => setTheme(THEMES[theme][0]));
  document.documentElement.dataset.ready = performance.now().toFixed(0);  // ms since the page opened
}

start();
