// @ts-check
"use strict";
/** The curves between boxes: edges of the graph, and ribbons of what is saved for the backward. */

/** An edge as a curve; one over a long way goes around what stands between. @param {any} from @param {any} to */
function bend(from, to) {
  const down = to.y >= from.y + from.h - 1;
  const x1 = from.x + from.w / 2, y1 = down ? from.y + from.h : from.y, x2 = to.x + to.w / 2, y2 = down ? to.y : to.y + to.h;
  const far = Math.abs(y2 - y1);
  const away = far > 90 ? (from.side === "fw" ? -1 : 1) * (Math.max(from.w, to.w) / 2 + Math.min(120, 14 + far * 0.04)) : 0;
  const reach = (down ? 1 : -1) * Math.max(10, Math.min(60, far / 2));
  return { from, to, x1, y1, x2, y2, away, reach, left: Math.min(x1, x2) - Math.abs(away), right: Math.max(x1, x2) + Math.abs(away),
    top: Math.min(y1, y2) - 10, bottom: Math.max(y1, y2) + 10 };
}

const FAR = 0.3; // below this scale an edge is a line, and a box has no round corners

/** Edges, of which those in sight are drawn. @param {CanvasRenderingContext2D} c @param {any[]} edges @param {any} sight
 * @param {number} scale */
function traceAll(c, edges, sight, scale) {
  const seen = edges.filter((e) => e.right > sight.left && e.left < sight.right && e.bottom > sight.top && e.top < sight.bottom);
  if (scale < FAR) traceFar(c, seen, sight, scale); else for (const e of seen) trace(c, e);
}

/** Lines as far as they are in sight, one for all that end in the same pixels. @param {CanvasRenderingContext2D} c
 * @param {any[]} edges @param {any} sight @param {number} scale */
function traceFar(c, edges, sight, scale) {
  const drawn = new Set(), within = (/** @type {number} */ y) => Math.min(Math.max(y, sight.top), sight.bottom);
  for (const e of edges) {
    const y1 = within(e.y1), y2 = within(e.y2), slope = (e.x2 - e.x1) / (e.y2 - e.y1 || 1);
    const x1 = e.x1 + slope * (y1 - e.y1), x2 = e.x1 + slope * (y2 - e.y1);
    const key = [x1 - sight.left, y1 - sight.top, x2 - sight.left, y2 - sight.top].map((each) => Math.round(each * scale)).join();
    if (drawn.has(key)) continue;
    drawn.add(key);
    c.moveTo(x1, y1); c.lineTo(x2, y2);
  }
}

/** @param {CanvasRenderingContext2D} c @param {any} e */
function trace(c, e) {
  c.moveTo(e.x1, e.y1);
  if (!e.away) c.bezierCurveTo(e.x1, e.y1 + e.reach, e.x2, e.y2 - e.reach, e.x2, e.y2);
  else {
    const side = (e.away < 0 ? Math.min : Math.max)(e.x1, e.x2) + e.away, middle = (e.y1 + e.y2) / 2;
    c.bezierCurveTo(e.x1, e.y1 + e.reach / 3, side, e.y1, side, (e.y1 + middle) / 2);
    c.lineTo(side, (e.y2 + middle) / 2);
    c.bezierCurveTo(side, e.y2, e.x2, e.y2 - e.reach / 3, e.x2, e.y2);
  }
}

/** Ribbons from forward to backward, one for each pair of boxes and fate; their width goes with the bytes. @param {any} stage @param {any} layout */
function ribbonsOf(stage, layout) {
  const found = new Map(), numbers = new Map(layout.items.map((/** @type {any} */ i, /** @type {number} */ n) => [i, n]));
  for (const kept of stage.kept) {
    const from = layout.rep.get(kept.from), to = layout.rep.get(kept.to);
    if (!from || !to) continue;
    const key = `${numbers.get(from)} ${numbers.get(to)} ${kept.fate}`;
    let one = found.get(key);
    if (!one) found.set(key, (one = { ribbon: true, from, to, fate: kept.fate, kept: [], storages: new Map() }));
    one.kept.push(kept);
    one.storages.set(kept.storage, kept.nbytes);
  }
  const all = [...found.values()];
  all.forEach((r) => { r.nbytes = [...r.storages.values()].reduce((sum, b) => sum + b, 0); });
  const sums = new Map(), fates = Object.keys(X.FATES);
  for (const r of all) for (const end of [r.from, r.to]) sums.set(end, (sums.get(end) || 0) + r.nbytes);
  const most = Math.max(1, ...[...sums].map(([end, sum]) => sum / (end.h - 8)));
  const used = new Map();
  all.sort((a, b) => a.from.y - b.from.y || fates.indexOf(a.fate) - fates.indexOf(b.fate) || a.to.y - b.to.y);
  for (const r of all) {
    r.width = r.nbytes ? Math.max(1.2, r.nbytes / most) : 1;
    for (const [end, name] of [[r.from, "y1"], [r.to, "y2"]]) {
      const before = used.get(end) || 0;
      used.set(end, before + r.width);
      r[name] = end.y + 4 + Math.min(before + r.width / 2, end.h - 8);
    }
    r.x1 = r.from.x + r.from.w; r.x2 = r.to.x;
    r.reach = Math.max(30, (r.x2 - r.x1) * 0.45); r.middle = (r.x1 + r.x2) / 2;
    r.top = Math.min(r.y1, r.y2) - r.width; r.bottom = Math.max(r.y1, r.y2) + r.width;
  }
  return all;
}

/** @param {any} r @param {number} x @param {number} y */
function isNear(r, x, y) {
  if (x < r.x1 || x > r.x2) return false;
  const t = (x - r.x1) / (r.x2 - r.x1), s = t * t * (3 - 2 * t);
  return Math.abs(r.y1 + (r.y2 - r.y1) * s - y) < r.width / 2 + 3;
}
