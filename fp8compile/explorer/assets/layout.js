// @ts-check
"use strict";
/**
 * Where boxes and nodes stand. The forward runs down the left column, the backward up the right one, so that a module's
 * backward stands beside its forward, and what is saved goes straight across.
 *
 * An open box holds rows: one for each child, in the order of the forward, and gaps between them for its own operations.
 * Both halves of a row have one height. In a gap, operations stand in layers: each below what it reads (above, in the
 * backward). Nothing is precomputed: which boxes are open decides, and a layout takes some milliseconds.
 *
 * @typedef {{box: any, node: any, side: "fw" | "bw", x: number, y: number, w: number, h: number, open: boolean}} Item
 */

const NODE = { w: 172, h: 34, gapX: 14, gapY: 12 };
const CLOSED = { w: 230, h: 46 };
const PAD = 12, HEAD = 26, ROW = 14, CHANNEL = 260, ACROSS = 4;

/** @param {any} tree @param {Set<string>} open @returns {{items: Item[], rep: Map<any, Item>, width: number, height: number}} */
X.layout = (tree, open) => {
  const root = measure(tree.root, open, true);
  /** @type {Item[]} */ const items = [];
  /** @type {Map<any, Item>} */ const rep = new Map();
  place(root, 0, 0, root.fw, root.fw ? root.fw + CHANNEL : 0, root.bw, items, rep);
  return { items, rep, width: root.fw + (root.bw ? CHANNEL : 0) + root.bw, height: root.h };
};

/** @param {any} box @param {Set<string>} open @param {boolean} isRoot @returns {any} */
function measure(box, open, isRoot) {
  const has = { fw: box.nodes.fw > 0, bw: box.nodes.bw > 0 };
  if (!isRoot && !open.has(box.key)) {
    return { box, open: false, fw: has.fw ? CLOSED.w : 0, bw: has.bw ? CLOSED.w : 0, h: CLOSED.h };
  }
  const inRows = box.children.filter((/** @type {any} */ each) => each.kind !== "group" || open.has(each.key));
  const gaps = gapsOf(box, inRows, open);
  const children = inRows.map((/** @type {any} */ each) => measure(each, open, false));
  const rows = [];
  let fw = 0, bw = 0, h = isRoot ? 0 : HEAD;
  for (let at = 0; at <= children.length; at++) {
    const gap = gaps[at];
    if (gap.fw.at.size || gap.bw.at.size) {
      const height = Math.max(gap.fw.h, gap.bw.h);
      rows.push({ gap, y: h, h: height });
      h += height + ROW;
      fw = Math.max(fw, gap.fw.w); bw = Math.max(bw, gap.bw.w);
    }
    if (at < children.length) {
      rows.push({ child: children[at], y: h, h: children[at].h });
      h += children[at].h + ROW;
      fw = Math.max(fw, children[at].fw); bw = Math.max(bw, children[at].bw);
    }
  }
  const pad = isRoot ? 0 : 2 * PAD;
  return { box, open: true, isRoot, rows, h: h + (isRoot ? 0 : PAD - ROW), fw: has.fw ? Math.max(fw, isRoot ? 0 : CLOSED.w) + pad : 0,
    bw: has.bw ? Math.max(bw, isRoot ? 0 : CLOSED.w) + pad : 0 };
}

/** What stands between the rows of a box: its own operations, and closed groups of them. @param {any} box @param {any[]} children
 * @param {Set<string>} open */
function gapsOf(box, children, open) {
  const gaps = X.gaps(box, children);
  const units = new Map(); // a closed group stands for its nodes
  for (const each of box.children) if (each.kind === "group" && !open.has(each.key)) for (const n of [...each.own.fw, ...each.own.bw]) units.set(n, each);
  return gaps.map((/** @type {any} */ gap) => ({ fw: layers(gap.fw, "fw", units), bw: layers(gap.bw, "bw", units) }));
}

/** @param {any[]} nodes @param {"fw" | "bw"} side @param {Map<any, any>} units */
function layers(nodes, side, units) {
  const depth = new Map();
  /** @type {any[][]} */ const found = [];
  for (const node of nodes) { // each behind those that it must stand below
    const unit = units.get(node) || node, above = side === "fw" ? node.from : node.to;
    let at = depth.get(unit) || 0;
    for (const each of above) { const other = units.get(each) || each; if (other !== unit && depth.has(other)) at = Math.max(at, depth.get(other) + 1); }
    depth.set(unit, at);
  }
  for (const [unit, at] of depth) (found[at] = found[at] || []).push(unit);
  const lines = found.flatMap((layer) => Array.from({ length: Math.ceil(layer.length / ACROSS) },
    (_, n) => layer.slice(n * ACROSS, (n + 1) * ACROSS)));
  const widest = Math.max(0, ...lines.map((line) => line.length)), at = new Map();
  const w = widest ? widest * (NODE.w + NODE.gapX) - NODE.gapX : 0;
  lines.forEach((line, y) => {
    const left = (w - (line.length * (NODE.w + NODE.gapX) - NODE.gapX)) / 2;
    line.forEach((unit, x) => at.set(unit, { x: left + x * (NODE.w + NODE.gapX), y: y * (NODE.h + NODE.gapY) }));
  });
  return { w, h: lines.length ? lines.length * (NODE.h + NODE.gapY) - NODE.gapY : 0, at };
}

/** @param {any} m @param {number} y @param {number} xF @param {number} wF @param {number} xB @param {number} wB
 * @param {Item[]} items @param {Map<any, Item>} rep */
function place(m, y, xF, wF, xB, wB, items, rep) {
  for (const [side, x, w] of /** @type {["fw" | "bw", number, number][]} */ ([["fw", xF, wF], ["bw", xB, wB]])) {
    if (!m[side] || m.isRoot) continue;
    const item = { box: m.box, node: null, side, x: x + (w - m[side]) / 2, y, w: m[side], h: m.h, open: m.open };
    items.push(item);
    if (!m.open) claim(m.box, side, item, rep);
  }
  if (!m.open) return;
  const left = xF + (wF - m.fw) / 2, right = xB + (wB - m.bw) / 2;
  const pad = m.isRoot ? 0 : PAD;
  for (const row of m.rows) {
    if (row.child) {
      place(row.child, y + row.y, left + pad, m.fw - 2 * pad, right + pad, m.bw - 2 * pad, items, rep);
      continue;
    }
    for (const [side, x, w] of /** @type {["fw" | "bw", number, number][]} */ ([["fw", left, m.fw], ["bw", right, m.bw]])) {
      const made = row.gap[side];
      for (const [unit, at] of made.at) {
        const isBox = unit.kind === "group", item = { box: isBox ? unit : m.box, node: isBox ? null : unit, side, x: x + (w - made.w) / 2 + at.x, y: y + row.y + (row.h - made.h) / 2 + at.y,
          w: NODE.w, h: NODE.h, open: false };
        items.push(item);
        if (isBox) claim(unit, side, item, rep); else rep.set(unit, item);
      }
    }
  }
}

/** All nodes in a closed box are drawn as it. @param {any} box @param {"fw" | "bw"} side @param {Item} item @param {Map<any, Item>} rep */
function claim(box, side, item, rep) {
  for (const node of box.own[side]) rep.set(node, item);
  for (const child of box.children) claim(child, side, item, rep);
}
