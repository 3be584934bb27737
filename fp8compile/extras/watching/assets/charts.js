"use strict";
// The charts: one a quantity, all runs in it; their cursors and zooms go together.

const CHARTS = [
  { key: "loss", title: "Loss", paths: ["loss"], format: number },
  { key: "scale", title: "Loss scale", paths: ["scale"], format: power, log: 2, steps: true },
  { key: "headroom", title: "Headroom", unit: "powers of two below overflow", paths: ["headroom", "fp8_headroom"], format: number },
  { key: "clipped", title: "Clipped", unit: "FP8 elements, operands that fell back", paths: ["clipped", "fell_back"], format: number },
  { key: "sqnr", title: "Optimizer states", unit: "SQNR in dB, sampled", group: "sqnr", format: decibels, points: true },
  { key: "tokens", title: "Tokens per second", paths: ["tokens_per_s"], format: number },
  { key: "seconds", title: "Time of a step", paths: ["seconds"], format: seconds, log: 10 },
  { key: "memory", title: "Memory", paths: ["memory", "memory_peak"], format: bytes },
];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const HEIGHT = 160; // pixels: 6 above the plot, 26 of steps below it

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Marks over every chart: the selected step, where overflows began, skipped steps.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
  const within = (step) => step >= plot.scales.x.min && step <= plot.scales.x.max;
  ctx.save();
  for (const { step, name, dashed } of marks.lines.filter((mark) => within(mark.step))) {
    const x = Math.round(plot.valToPos(step, "x", true));
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash(dashed ? [4 * ratio, 3 * ratio] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = colour("--warn");
  const bottom = bbox.top + bbox.height, size = 5 * ratio;
  for (const step of marks.skipped.filter(within)) {
    const x = plot.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bottom - size * 1.6);
    ctx.lineTo(x - size, bottom);
    ctx.lineTo(x + size, bottom);
    ctx.fill();
  }
  ctx.restore();
}

class Chart {
  constructor(spec, hooks) {
    this.spec = spec;
    this.hooks = hooks; // marks(), select(step)
    this.values = element("span", { class: "values" });
    this.plotted = element("div", { class: "plot", role: "img" });
    const unit = spec.unit ? element("span", { class: "soft", text: spec.unit }) : null;
    const caption = element("figcaption", {}, element("b", { text: spec.title }), unit, this.values);
    this.figure = element("figure", { class: "chart", "data-chart": spec.key }, caption, this.plotted);
    this.signature = "";
    new ResizeObserver(() => this.resize()).observe(this.plotted);
  }

  // [{run, path, label}] of what there is to draw.
  series(runs) {
    const found = [];
    for (const run of runs) {
      let paths = this.spec.paths;
      if (this.spec.group) {
        const names = new Set();
        run.records.forEach((record) => Object.keys(record[this.spec.group] || {}).forEach((name) => names.add(name)));
        paths = [...names].map((name) => `${this.spec.group}.${name}`);
      }
      for (const path of paths)
        if (run.records.some((record) => valueAt(record, path) !== null)) found.push({ run, path });
    }
    return found;
  }

  // Returns whether there is anything to draw.
  update(runs, dark) {
    this.shown = this.series(runs);
    this.figure.hidden = this.shown.length === 0;
    if (!this.shown.length) return false;
    const tables = this.shown.map(({ run, path }) => [
      run.records.map((record) => record.step),
      run.records.map((record) => valueAt(record, path)),
    ]);
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const signature = JSON.stringify([dark, this.shown.map(({ run, path }) => [run.name, path])]);
    if (signature !== this.signature) this.build(data, signature);
    else this.plot.setData(data, !this.zoomed);
    this.describe();
    return true;
  }

  get zoomed() {
    const { x } = this.plot.scales, steps = this.plot.data[0];
    return this.full !== undefined && (x.min > this.full[0] || x.max < this.full[1]) && steps.length > 0;
  }

  build(data, signature) {
    const zoom = this.plot && this.zoomed ? { ...this.plot.scales.x } : null;
    if (this.plot) this.plot.destroy();
    this.signature = signature;
    this.plot = new uPlot(this.options(), data, this.plotted);
    if (zoom) this.plot.setScale("x", { min: zoom.min, max: zoom.max });
    let pressed = 0;
    this.plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    this.plot.over.addEventListener("click", (event) => {
      const step = this.plot.data[0][this.plot.posToIdx(event.offsetX)];
      if (Math.abs(event.clientX - pressed) < 4 && step !== undefined) this.hooks.select(step);
    });
  }

  options() {
    const { spec } = this, many = new Set(this.shown.map(({ run }) => run)).size > 1;
    const axis = { stroke: colour("--soft"), font: "11px system-ui, sans-serif", ticks: { stroke: colour("--line") }, grid: { stroke: colour("--grid"), width: 1 } };
    return {
      width: Math.max(200, this.plotted.clientWidth), height: HEIGHT, legend: { show: false }, padding: [6, 12, 0, 0],
      cursor: { sync: { key: "run", scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: spec.log ? { distr: 3, log: spec.log } : {} },
      axes: [
        { ...axis, size: 26, gap: 3, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? number(step) : "")) },
        { ...axis, size: 70, space: 26, values: (_, splits) => splits.map((value) => (value === null ? "" : spec.format(value))) },
      ],
      series: [{}, ...this.shown.map(({ run, path }) => this.line(run, path, many))],
      hooks: { draw: [(plot) => drawMarks(plot, this.hooks.marks())], setCursor: [() => this.tell()] },
    };
  }

  line(run, path, many) {
    const paths = this.shown.filter((each) => each.run === run).map((each) => each.path), at = paths.indexOf(path);
    const stroke = colour(`--run${(many ? run.index : run.index + at) % 8}`);
    return {
      label: path, stroke, width: 1.6, dash: many ? DASHES[at % DASHES.length] : [], spanGaps: Boolean(this.spec.points),
      points: { show: this.spec.points || run.records.length < 2, size: 5, fill: stroke },
      paths: this.spec.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
    };
  }

  // The values at the cursor, else at the last step that has any.
  tell() {
    if (!this.plot) return;
    const { idx } = this.plot.cursor;
    const many = this.shown.length > 1;
    this.values.replaceChildren(...this.shown.slice(0, 8).map(({ run, path }, at) => {
      const column = this.plot.data[at + 1];
      let index = idx === null || idx === undefined ? column.length - 1 : idx;
      if (idx === null || idx === undefined) while (index > 0 && (column[index] === null || column[index] === undefined)) index -= 1;
      const name = path.split(".").pop().replaceAll("_", " ");
      const several = new Set(this.shown.map((each) => each.run)).size > 1;
      const label = many ? `${several ? `${run.name} ` : ""}${this.spec.paths && this.spec.paths.length === 1 ? "" : name} ` : "";
      return element("span", { text: label + this.spec.format(column[index]), style: { "--dot": this.plot.series[at + 1]._stroke || this.plot.series[at + 1].stroke() } });
    }));
  }

  describe() {
    const column = this.plot.data[1].filter((value) => value !== null && value !== undefined);
    const steps = this.plot.data[0];
    this.full = [steps[0], steps[steps.length - 1]];
    const [low, high] = column.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    const { format, title } = this.spec;
    this.plotted.setAttribute("aria-label",
      `${title}: ${format(column[column.length - 1])} at the last of ${steps.length} steps, ${format(low)} to ${format(high)}`);
    this.tell();
  }

  resize() {
    const width = this.plotted.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  redraw() {
    if (this.plot && !this.figure.hidden) this.plot.redraw(false);
  }
}
