// @ts-check
"use strict";
/** The graph on the screen: what is open, what is selected, moving by mouse, touch and keyboard. */

class View {
  /** @param {any} graph */
  constructor(graph) {
    this.canvas = X.byId("canvas");
    this.scene = new Scene(this.canvas);
    this.changed = X.signal(); // what is open or drawn
    this.chosen = X.signal(); // what is selected
    /** @type {Set<string>} */ this.open = new Set();
    /** @type {any} */ this.selected = null;
    this.listen();
    this.setGraph(graph);
  }

  /** @param {any} graph */
  setGraph(graph) {
    this.graph = graph;
    this.setStage(graph.last, -1);
    this.openTheFirst();
  }

  /** Shows a stage; with the number of a pass, what it changed. @param {number} number @param {number} pass */
  setStage(number, pass) {
    this.graph.forget();
    this.sums = pass >= 0 ? this.graph.compare(pass) : null;
    this.pass = pass;
    this.stage = this.graph.stage(number);
    this.tree = X.modules(this.graph, this.stage);
    if (this.selected) this.selected = this.again(this.selected);
    this.relayout();
  }

  /** The same node or box in the present stage. @param {any} selected */
  again(selected) {
    if (selected.node) {
      const node = this.stage.byKey.get(selected.node.key);
      return node ? { node, box: this.tree.home.get(node) } : null;
    }
    const box = this.tree.byKey.get(selected.box.key);
    return box ? { node: null, box } : null;
  }

  /** Opens boxes from the top while they stay few enough to be read. */
  openTheFirst() {
    this.open.clear();
    let wide = [this.tree.root], count = this.tree.root.children.filter((/** @type {any} */ c) => c.kind !== "group").length;
    while (wide.length) {
      const next = wide.flatMap((box) => box.children.filter((/** @type {any} */ c) => c.children.some((/** @type {any} */ each) => each.kind === "module" || each.kind === "run")));
      for (const box of next) {
        const inside = box.children.filter((/** @type {any} */ c) => c.kind !== "group").length;
        if (count + inside > 26 || box.own.fw.length > 30) continue;
        this.open.add(box.key);
        count += inside;
      }
      wide = next.filter((box) => this.open.has(box.key));
    }
    this.relayout();
    this.fit();
  }

  relayout() {
    this.layout = X.layout(this.tree, this.open);
    this.scene.selected = this.selected;
    this.scene.show(this.stage, this.layout);
    this.changed();
  }

  /** @param {any} box @param {boolean} [to] */
  toggle(box, to = !this.open.has(box.key)) {
    if (box.kind === "root") return;
    const before = this.itemOf({ node: null, box });
    const y = before ? (before.y - this.scene.view.y) : 0, x = before ? before.x + before.w / 2 - this.scene.view.x : 0;
    if (to) this.open.add(box.key); else this.open.delete(box.key);
    this.relayout();
    const after = this.itemOf({ node: null, box });
    if (before && after) {
      this.scene.view.y = after.y - y; this.scene.view.x = after.x + after.w / 2 - x; // it stays where it was
    }
  }

  /** @param {any} selected `{node, box}`, or null */
  select(selected) {
    this.selected = this.scene.selected = selected;
    this.scene.draw();
    this.chosen(selected);
  }

  /** Opens what hides it, selects it, brings it into sight. @param {any} selected */
  reveal(selected) {
    for (let box = selected.node ? selected.box : selected.box.parent; box; box = box.parent) if (box.kind !== "root") this.open.add(box.key);
    this.selected = selected;
    this.relayout();
    this.select(selected);
    this.centre(this.itemOf(selected));
  }

  /** @param {any} selected */
  itemOf(selected) {
    return this.layout.items.find((/** @type {any} */ i) => isPart(i, selected)) || null;
  }

  /** @param {any} item */
  centre(item) {
    if (!item) return;
    const v = this.scene.view, box = this.canvas.getBoundingClientRect();
    v.scale = Math.max(v.scale, 0.7);
    const twin = item.node ? null : this.layout.items.find((/** @type {any} */ i) => i !== item && i.box === item.box && !i.node);
    const right = twin ? Math.max(item.x + item.w, twin.x + twin.w) : item.x + item.w, left = twin ? Math.min(item.x, twin.x) : item.x;
    if (twin) v.scale = Math.min(v.scale, Math.max(0.55, box.width / (right - left + 60)));
    v.x = (right - left) * v.scale < box.width ? (left + right) / 2 - box.width / v.scale / 2 : item.x - 30;
    v.y = item.y + Math.min(item.h, 200) / 2 - box.height / v.scale / 2;
    this.scene.draw();
  }

  /** All of it where it can be read so; else its width, from the top. */
  fit() {
    const box = this.canvas.getBoundingClientRect(), { width, height } = this.layout;
    const wide = box.width / (width + 60), high = box.height / (height + 80);
    const scale = Math.min(1.25, wide, Math.max(high, 0.55));
    this.scene.view = { scale, x: width / 2 - box.width / scale / 2, y: high >= scale * 0.999 ? height / 2 - 20 - box.height / scale / 2 : -50 };
    this.scene.draw();
  }

  /** @param {number} by @param {number} [px] @param {number} [py] */
  zoom(by, px = this.canvas.clientWidth / 2, py = this.canvas.clientHeight / 2) {
    const v = this.scene.view, scale = Math.min(4, Math.max(0.04, v.scale * by));
    v.x += px / v.scale - px / scale; v.y += py / v.scale - py / scale;
    v.scale = scale;
    this.scene.draw();
  }

  /** @param {number} dx @param {number} dy in CSS pixels */
  pan(dx, dy) {
    this.scene.view.x += dx / this.scene.view.scale; this.scene.view.y += dy / this.scene.view.scale;
    this.scene.draw();
  }

  listen() {
    /** @type {Map<number, {x: number, y: number}>} */ const down = new Map();
    let moved = 0;
    const c = this.canvas, at = (/** @type {any} */ e) => { const b = c.getBoundingClientRect(); return { x: e.clientX - b.left, y: e.clientY - b.top }; };
    c.addEventListener("wheel", (/** @type {any} */ e) => {
      e.preventDefault();
      const p = at(e);
      if (e.ctrlKey || e.metaKey) this.zoom(Math.exp(-e.deltaY * 0.01), p.x, p.y); else this.pan(e.deltaX, e.deltaY);
    }, { passive: false });
    c.addEventListener("pointerdown", (/** @type {any} */ e) => { c.setPointerCapture(e.pointerId); down.set(e.pointerId, at(e)); moved = 0; });
    c.addEventListener("pointermove", (/** @type {any} */ e) => {
      const p = at(e), before = down.get(e.pointerId);
      if (!before) { this.hover(p); return; }
      const other = [...down].find(([id]) => id !== e.pointerId);
      moved += Math.abs(p.x - before.x) + Math.abs(p.y - before.y);
      if (other) {
        const was = Math.hypot(before.x - other[1].x, before.y - other[1].y), is = Math.hypot(p.x - other[1].x, p.y - other[1].y);
        this.zoom(is / Math.max(was, 1), (p.x + other[1].x) / 2, (p.y + other[1].y) / 2);
      } else this.pan(before.x - p.x, before.y - p.y);
      down.set(e.pointerId, p);
    });
    const up = (/** @type {any} */ e) => { if (down.delete(e.pointerId) && moved < 6 && e.type === "pointerup") this.click(at(e)); };
    c.addEventListener("pointerup", up);
    c.addEventListener("pointercancel", up);
    c.addEventListener("dblclick", (/** @type {any} */ e) => { const i = this.scene.at(at(e).x, at(e).y); if (i && !i.ribbon && !i.node) this.toggle(i.box); });
    c.addEventListener("keydown", (/** @type {any} */ e) => this.key(e));
    new ResizeObserver(() => this.scene.resize()).observe(c);
  }

  /** @param {{x: number, y: number}} p */
  hover(p) {
    const item = this.scene.at(p.x, p.y);
    if (item === this.scene.hovered) return;
    this.scene.hovered = item;
    this.canvas.style.cursor = item ? "pointer" : "grab";
    this.canvas.title = !item ? "" : item.ribbon ? `${X.FATES[item.fate].label}: ${X.human(item.nbytes)} in ${X.count(item.storages.size, "tensor")}`
      : item.node ? `${item.node.name}: ${item.node.value}` : `${X.pathOf(item.box)}: click to select, twice to ${item.open ? "close" : "open"}`;
    this.scene.draw();
  }

  /** @param {{x: number, y: number}} p */
  click(p) {
    const item = this.scene.at(p.x, p.y);
    this.canvas.focus({ preventScroll: true });
    if (!item) this.select(null);
    else if (item.ribbon) this.select({ node: null, box: item.from.box, ribbon: item });
    else this.select({ node: item.node, box: item.box });
  }

  /** @param {any} e */
  key(e) {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[/** @type {"ArrowUp"} */ (e.key)];
    if (step && e.shiftKey) this.pan(step[0] * 80, step[1] * 80);
    else if (step) this.step(step[0], step[1]);
    else if (e.key === "Enter" || e.key === " ") { if (this.selected && !this.selected.node) this.toggle(this.selected.box); }
    else if (e.key === "Backspace") this.up();
    else if (e.key === "Escape") this.select(null);
    else if (e.key === "+" || e.key === "=") this.zoom(1.25);
    else if (e.key === "-") this.zoom(0.8);
    else if (e.key === "0") this.fit();
    else return;
    e.preventDefault();
  }

  /** Closes the box around what is selected, and selects that. */
  up() {
    if (!this.selected) return;
    const box = this.selected.node ? this.selected.box : this.selected.box.parent;
    if (!box || box.kind === "root") return;
    this.toggle(box, false);
    this.select({ node: null, box });
  }

  /** To the nearest thing in a direction. @param {number} dx @param {number} dy */
  step(dx, dy) {
    const items = this.layout.items, here = this.selected && this.itemOf(this.selected);
    if (!here) { if (items[0]) this.select({ node: items[0].node, box: items[0].box }); return; }
    const middle = (/** @type {any} */ i) => [i.x + i.w / 2, i.open ? i.y + 13 : i.y + i.h / 2], [x, y] = middle(here);
    let best = null, least = Infinity;
    for (const item of items) {
      const [a, b] = middle(item), along = (a - x) * dx + (b - y) * dy, across = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      if (item !== here && along > 4 && along + 2.5 * across < least) { least = along + 2.5 * across; best = item; }
    }
    if (best) { this.select({ node: best.node, box: best.box }); this.scrollTo(best); }
  }

  /** @param {any} item */
  scrollTo(item) {
    const v = this.scene.view, w = this.canvas.clientWidth / v.scale, h = this.canvas.clientHeight / v.scale;
    if (item.x < v.x || item.x + item.w > v.x + w || item.y < v.y || item.y + Math.min(item.h, 40) > v.y + h) this.centre(item);
  }
}
