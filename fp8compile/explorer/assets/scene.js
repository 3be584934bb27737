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
    this.items = layout.items;
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
    for (const item of this.shown.items) if (item.open && inSight(item, sight)) this.frameOf(c, item, scale);
    this.paintEdges(c, sight, scale);
    this.paintRibbons(c, sight, scale);
    let drawn = 0;
    for (const item of this.shown.items) if (!item.open && inSight(item, sight)) { this.boxOf(c, item, scale); drawn++; }
    this.drawn = drawn;
  }

  /** @param {CanvasRenderingContext2D} c */
  headings(c) {
    const items = this.shown.items;
    c.fillStyle = this.colours["--soft"];
    c.font = "600 15px system-ui, sans-serif";
    c.textAlign = "center";
    for (const [side, text] of [["fw", "forward ↓"], ["bw", "backward ↑"]]) {
      const one = items.filter((/** @type {any} */ i) => i.side === side);
      if (!one.length) continue;
      const left = Math.min(...bounds(one, "left")), right = Math.max(...bounds(one, "right"));
      c.fillText(text, (left + right) / 2, -18);
    }
    if (this.ribbons.some((r) => !this.hidden.has(r.fate))) c.fillText("saved for the backward", this.ribbons[0].middle, -18);
  }

  /** @param {CanvasRenderingContext2D} c @param {any} sight @param {number} scale */
  paintEdges(c, sight, scale) {
    c.lineWidth = Math.max(1, 0.7 / scale);
    c.strokeStyle = this.colours["--line"];
    c.beginPath();
    for (const e of this.edges) if (e.right > sight.left && e.left < sight.right && e.bottom > sight.top && e.top < sight.bottom) trace(c, e, scale);
    c.stroke();
    const one = this.selected;
    if (!one) return;
    c.lineWidth = Math.max(2, 1.2 / scale);
    c.strokeStyle = this.colours["--accent"];
    c.beginPath();
    for (const e of this.edges) if (isPart(e.from, one) || isPart(e.to, one)) trace(c, e, scale);
    c.stroke();
  }

  /** @param {CanvasRenderingContext2D} c @param {any} sight @param {number} scale */
  paintRibbons(c, sight, scale) {
    for (const r of this.ribbons) {
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
    rounded(c, item, 8);
    c.fill(); c.stroke();
    const size = Math.max(12, Math.min(13 / scale, 22));
    c.fillStyle = this.colours["--soft"];
    c.font = `600 ${size}px system-ui, sans-serif`;
    c.textAlign = "left";
    c.fillText(`▾ ${item.box.label}`, item.x + 8, item.y + 18, item.w - 16);
  }

  /** A closed box or a node. @param {CanvasRenderingContext2D} c @param {any} item @param {number} scale */
  boxOf(c, item, scale) {
    const node = item.node, diff = node ? node.diff : boxDiff(item.box);
    const chosen = isPart(item, this.selected);
    c.globalAlpha = node && node.view ? 0.6 : 1;
    c.fillStyle = this.colours["--card"];
    c.strokeStyle = chosen ? this.colours["--accent"] : diff ? this.colours[`--${diff}`] : this.colours["--line"];
    c.lineWidth = (chosen || diff ? 2.5 : item === this.hovered ? 2 : 1) / Math.min(1, Math.max(scale, 0.5));
    if (scale < 0.3) { c.fillRect(item.x, item.y, item.w, item.h); c.strokeRect(item.x, item.y, item.w, item.h); }
    else { rounded(c, item, 7); c.fill(); c.stroke(); }
    c.fillStyle = node ? this.colours[KIND[node.kind] || "--soft"] : item.box.kind === "group" || item.box.kind === "own" ? this.colours["--spliced"] : this.colours["--accent"];
    c.fillRect(item.x + 1, item.y + 6, 4, item.h - 12);
    if (item.h * scale > 12) (node ? nodeText : item.box.kind === "group" ? groupText : boxText)(c, item, this.colours);
    c.globalAlpha = 1;
  }

  /** What is at a place of the canvas, in CSS pixels. @param {number} px @param {number} py */
  at(px, py) {
    const x = this.view.x + px / this.view.scale, y = this.view.y + py / this.view.scale;
    let found = null;
    for (const item of this.shown.items) {
      if (x >= item.x && x <= item.x + item.w && y >= item.y && y <= item.y + item.h) {
        if (!item.open) return item;
        found = item;
      }
    }
    return found || this.ribbons.find((r) => !this.hidden.has(r.fate) && isNear(r, x, y)) || null;
  }
}

/** @type {Record<string, string>} */
const KIND = { matmul: "--matmul", spliced: "--spliced", input: "--input", output: "--input" };

/** @param {any[]} items @param {"left" | "right"} which */
function bounds(items, which) {
  return items.slice(0, 4000).map((i) => (which === "left" ? i.x : i.x + i.w));
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

/** @param {CanvasRenderingContext2D} c @param {any} i @param {number} radius */
function rounded(c, i, radius) {
  c.beginPath();
  c.roundRect(i.x, i.y, i.w, i.h, radius);
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
  const told = [added && `+${added}`, removed && `−${removed}`, changed && `~${changed}`].filter(Boolean).join(" ");
  const saved = side === "fw" && bytes ? `, saves ${X.human(/** @type {number} */ (bytes))}` : "";
  c.fillText(told || `${X.count(box.nodes[side], "operation")}${saved}`, i.x + 13, i.y + 37, i.w - 22);
}
