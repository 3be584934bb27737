// @ts-check
"use strict";
/**
 * Draws a layout on a canvas: edges, what is kept for the backward as ribbons, boxes. Only what is in sight is drawn, and
 * small things without their text, so that thousands of nodes can be moved.
 */

class Scene {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.view = { x: 0, y: 0, scale: 1 };
    /** @type {any} */ this.shown = { items: [], rep: new Map(), width: 0, height: 0 };
    /** @type {any[]} */ this.edges = [];
    /** @type {any[]} */ this.ribbons = [];
    /** @type {[string, number][]} */ this.columns = [];
    this.open = this.closed = this.edgesAt = this.ribbonsAt = new Shelves([]);
    /** @type {Set<string>} */ this.hidden = new Set(["callers"]);
    /** @type {any} */ this.selected = null;
    /** @type {any} */ this.hovered = null;
    this.frame = 0;
    this.drawn = 0;
    this.readColours();
  }

  readColours() {
    const names = ["--text", "--soft", "--line", "--card", "--head", "--accent", "--matmul", "--spliced", "--input", "--added",
      "--removed", "--changed", ...Object.values(X.FATES).map((/** @type {any} */ f) => f.colour)];
    /** @type {Record<string, string>} */ this.colours = Object.fromEntries(names.map((name) => [name, X.colour(name)]));
  }

  /** @param {any} stage @param {any} layout */
  show(stage, layout) {
    this.shown = layout;
    const pairs = new Map();
    for (const node of stage.nodes) {
      const to = layout.rep.get(node);
      for (const source of node.from) {
        const from = layout.rep.get(source);
        if (!from || !to || from === to || from.side !== to.side) continue;
        let inner = pairs.get(from);
        if (!inner) pairs.set(from, (inner = new Map()));
        inner.set(to, (inner.get(to) || 0) + 1);
      }
    }
    this.edges = [];
    for (const [from, inner] of pairs) for (const to of inner.keys()) this.edges.push(bend(from, to));
    this.ribbons = ribbonsOf(stage, layout);
    this.open = new Shelves(layout.items.filter((/** @type {any} */ i) => i.open));
    this.closed = new Shelves(layout.items.filter((/** @type {any} */ i) => !i.open));
    this.edgesAt = new Shelves(this.edges);
    this.ribbonsAt = new Shelves(this.ribbons);
    this.columns = columnsOf(layout.items);
    this.draw();
  }

  resize() {
    const ratio = window.devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
    this.canvas.width = Math.max(1, Math.round(box.width * ratio));
    this.canvas.height = Math.max(1, Math.round(box.height * ratio));
    this.draw();
  }

  /** Draws once before the next frame, however often it is called. */
  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  paint() {
    const c = this.context, ratio = window.devicePixelRatio || 1, { x, y, scale } = this.view;
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, this.canvas.width, this.canvas.height);
    c.setTransform(scale * ratio, 0, 0, scale * ratio, -x * scale * ratio, -y * scale * ratio);
    const sight = { left: x, top: y, right: x + this.canvas.width / ratio / scale, bottom: y + this.canvas.height / ratio / scale };
    this.headings(c);
    const open = this.open.within(sight.top, sight.bottom).filter((item) => inSight(item, sight));
    for (const item of open) this.frameOf(c, item, scale);
    this.paintEdges(c, sight, scale);
    this.paintRibbons(c, sight, scale);
    this.titles(c, open, scale);
    let drawn = 0;
    for (const item of this.closed.within(sight.top, sight.bottom)) if (inSight(item, sight)) { this.boxOf(c, item, scale); drawn++; }
    this.drawn = drawn;
  }

  /** @param {CanvasRenderingContext2D} c */
  headings(c) {
    c.fillStyle = this.colours["--soft"];
    c.font = "600 15px system-ui, sans-serif";
    c.textAlign = "center";
    for (const [text, middle] of this.columns) c.fillText(text, middle, -18);
    if (this.ribbons.some((r) => !this.hidden.has(r.fate))) c.fillText("saved for the backward", this.ribbons[0].middle, -18);
  }

  /** @param {CanvasRenderingContext2D} c @param {any} sight @param {number} scale */
  paintEdges(c, sight, scale) {
    c.lineWidth = Math.max(1, 0.7 / scale);
    c.strokeStyle = this.colours["--line"];
    c.beginPath();
    traceAll(c, this.edgesAt.within(sight.top, sight.bottom), sight, scale);
    c.stroke();
    const one = this.selected;
    if (!one) return;
    c.lineWidth = Math.max(2, 1.2 / scale);
    c.strokeStyle = this.colours["--accent"];
    c.beginPath();
    traceAll(c, this.edges.filter((e) => isPart(e.from, one) || isPart(e.to, one)), sight, scale);
    c.stroke();
  }

  /** @param {CanvasRenderingContext2D} c @param {any} sight @param {number} scale */
  paintRibbons(c, sight, scale) {
    for (const r of this.ribbonsAt.within(sight.top, sight.bottom)) {
      if (this.hidden.has(r.fate) || r.bottom < sight.top || r.top > sight.bottom) continue;
      const strong = this.selected && (isWithin(r.from, this.selected) || isWithin(r.to, this.selected));
      c.globalAlpha = strong || r === this.hovered ? 0.95 : this.selected ? 0.28 : 0.6;
      c.strokeStyle = this.colours[X.FATES[r.fate].colour];
      c.lineWidth = Math.max(r.width, 1.2 / scale);
      c.beginPath();
      c.moveTo(r.x1, r.y1);
      c.bezierCurveTo(r.x1 + r.reach, r.y1, r.x2 - r.reach, r.y2, r.x2, r.y2);
      c.stroke();
    }
    c.globalAlpha = 1;
  }

  /** An open box. @param {CanvasRenderingContext2D} c @param {any} item @param {number} scale */
  frameOf(c, item, scale) {
    c.fillStyle = this.colours["--head"];
    c.strokeStyle = isPart(item, this.selected) ? this.colours["--accent"] : this.colours["--line"];
    c.lineWidth = isPart(item, this.selected) ? 2 / Math.min(scale, 1) : 1;
    block(c, item, 8, scale);
  }

  /** The names of open boxes, over the edges that go through them. @param {CanvasRenderingContext2D} c @param {any[]} open
   * @param {number} scale */
  titles(c, open, scale) {
    const size = Math.max(12, Math.min(13 / scale, 22));
    if (size * scale < 3) return;
    c.fillStyle = this.colours["--soft"];
    c.strokeStyle = this.colours["--head"];
    c.lineWidth = 3;
    c.lineJoin = "round";
    c.font = `600 ${size}px system-ui, sans-serif`;
    c.textAlign = "left";
    for (const item of open) for (const write of ["strokeText", "fillText"]) {
      c[/** @type {"fillText"} */ (write)](`▾ ${item.box.label}`, item.x + 8, item.y + 18, item.w - 16);
    }
  }

  /** A closed box or a node. @param {CanvasRenderingContext2D} c @param {any} item @param {number} scale */
  boxOf(c, item, scale) {
    const node = item.node, diff = node ? node.diff : boxDiff(item.box);
    const chosen = isPart(item, this.selected);
    c.globalAlpha = node && node.view ? 0.6 : 1;
    c.fillStyle = this.colours["--card"];
    c.strokeStyle = chosen ? this.colours["--accent"] : diff ? this.colours[`--${diff}`] : this.colours["--line"];
    c.lineWidth = (chosen || diff ? 2.5 : item === this.hovered ? 2 : 1) / Math.min(1, Math.max(scale, 0.5));
    block(c, item, 7, scale);
    c.fillStyle = node ? this.colours[KIND[node.kind] || "--soft"] : item.box.kind === "group" || item.box.kind === "own" ? this.colours["--spliced"] : this.colours["--accent"];
    c.fillRect(item.x + 1, item.y + 6, 4, item.h - 12);
    if (item.h * scale > 12) (node ? nodeText : item.box.kind === "group" ? groupText : boxText)(c, item, this.colours);
    c.globalAlpha = 1;
  }

  /** What is at a place of the canvas, in CSS pixels. @param {number} px @param {number} py */
  at(px, py) {
    const x = this.view.x + px / this.view.scale, y = this.view.y + py / this.view.scale;
    const holds = (/** @type {any} */ i) => x >= i.x && x <= i.x + i.w && y >= i.y && y <= i.y + i.h;
    return this.closed.within(y, y).find(holds) || this.open.within(y, y).filter(holds).pop()
      || this.ribbonsAt.within(y - 3, y + 3).find((r) => !this.hidden.has(r.fate) && isNear(r, x, y)) || null;
  }
}

/** @type {Record<string, string>} */
const KIND = { matmul: "--matmul", spliced: "--spliced", input: "--input", output: "--input" };

/** The headings of the columns, each with its middle. @param {any[]} items @returns {[string, number][]} */
function columnsOf(items) {
  /** @type {[string, number][]} */ const found = [];
  for (const [side, text] of [["fw", "forward ↓"], ["bw", "backward ↑"]]) {
    let left = Infinity, right = -Infinity;
    for (const i of items) if (i.side === side) { left = Math.min(left, i.x); right = Math.max(right, i.x + i.w); }
    if (left < right) found.push([text, (left + right) / 2]);
  }
  return found;
}

/** @param {any} i @param {any} s */
function inSight(i, s) {
  return i.x < s.right && i.x + i.w > s.left && i.y < s.bottom && i.y + i.h > s.top;
}

/** Whether an item is what is selected: the node, or the box. @param {any} item @param {any} selected */
function isPart(item, selected) {
  return Boolean(selected) && (selected.node ? item.node === selected.node : !item.node && item.box === selected.box);
}

/** Whether an item is what is selected, or in it. @param {any} item @param {any} selected */
function isWithin(item, selected) {
  if (selected.node) return item.node === selected.node;
  for (let box = item.box; box; box = box.parent) if (box === selected.box) return true;
  return false;
}

/** @param {any} box */
function boxDiff(box) {
  const { added, removed, changed } = box.diff;
  return removed ? "removed" : added ? "added" : changed ? "changed" : "";
}

/** A filled box with its line; from afar its corners are not round. @param {CanvasRenderingContext2D} c @param {any} i
 * @param {number} radius @param {number} scale */
function block(c, i, radius, scale) {
  if (scale < FAR) { c.fillRect(i.x, i.y, i.w, i.h); c.strokeRect(i.x, i.y, i.w, i.h); return; }
  c.beginPath();
  c.roundRect(i.x, i.y, i.w, i.h, radius);
  c.fill(); c.stroke();
}

/** @param {CanvasRenderingContext2D} c @param {any} i @param {Record<string, string>} colours */
function nodeText(c, i, colours) {
  c.textAlign = "left";
  c.fillStyle = colours["--text"];
  c.font = "600 12px system-ui, sans-serif";
  c.fillText(i.node.op === "input" || i.node.op === "output" ? `${i.node.op} ${i.node.op === "input" ? i.node.name : ""}` : X.short(i.node.op), i.x + 11, i.y + 14, i.w - 18);
  c.fillStyle = colours["--soft"];
  c.font = "11px system-ui, sans-serif";
  c.fillText(i.node.value || i.node.name, i.x + 11, i.y + 28, i.w - 18);
}

/** @param {CanvasRenderingContext2D} c @param {any} i @param {Record<string, string>} colours */
function groupText(c, i, colours) {
  c.textAlign = "left";
  c.fillStyle = colours["--text"];
  c.font = "600 12px system-ui, sans-serif";
  c.fillText(`▸ ${i.box.label}`, i.x + 11, i.y + 14, i.w - 18);
  c.fillStyle = colours["--soft"];
  c.font = "11px system-ui, sans-serif";
  c.fillText(X.count(i.box.nodes[i.side], "operation"), i.x + 11, i.y + 28, i.w - 18);
}

/** @param {CanvasRenderingContext2D} c @param {any} i @param {Record<string, string>} colours */
function boxText(c, i, colours) {
  const { box, side } = i, alike = box.kind === "run" ? `  ×${box.members} alike` : "";
  c.textAlign = "left";
  c.fillStyle = colours["--text"];
  c.font = "600 14px system-ui, sans-serif";
  c.fillText(`▸ ${box.label}${alike}`, i.x + 13, i.y + 19, i.w - 22);
  c.fillStyle = colours["--soft"];
  c.font = "12px system-ui, sans-serif";
  const bytes = Object.values(box.bytes).reduce((/** @type {number} */ sum, b) => sum + /** @type {number} */ (b), 0);
  const { added, removed, changed } = box.diff;
  const summary = [added && `+${added}`, removed && `−${removed}`, changed && `~${changed}`].filter(Boolean).join(" ");
  const saved = side === "fw" && bytes ? `, saves ${X.human(/** @type {number} */ (bytes))}` : "";
  c.fillText(summary || `${X.count(box.nodes[side], "operation")}${saved}`, i.x + 13, i.y + 37, i.w - 22);
}
