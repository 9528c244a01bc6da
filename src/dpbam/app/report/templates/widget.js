// The paper's Figure 1 to play with: two gradients, a clipping norm, and the bias between the two means.
const PRESETS = {
  paper: { g1: [1.59, 2.6], g2: [-1.26, 0.31], c: 1.3 },
  opposite: { g1: [3, 0], g2: [-3, 0], c: 1 },
  shrunk: { g1: [3, 0], g2: [-2, 0], c: 1 },
  unclipped: { g1: [0.5, 0.8], g2: [-0.6, 0.5], c: 1.2 },
};
const REACH = 3.4; // the plane shown is [-REACH, REACH] squared
const C_RANGE = [0.1, 3.3];

const plus = (u, v, k = 1) => [u[0] + k * v[0], u[1] + k * v[1]];
const times = (u, k) => [u[0] * k, u[1] * k];
const inner = (u, v) => u[0] * v[0] + u[1] * v[1];
const size = (u) => Math.hypot(...u);

/** Appendix D in two dimensions, l = 2: g_clip = a g_hat + c, bias = (a - 1) g_hat + c. */
function clippingBias({ g1, g2, c }) {
  const clip = (g) => times(g, 1 / Math.max(1, size(g) / c)); // g / M, M = max(1, |g| / C)
  const plain = times(plus(g1, g2), 0.5);
  const [k1, k2] = [clip(g1), clip(g2)];
  const clipped = times(plus(k1, k2), 0.5);
  const bias = plus(clipped, plain, -1);
  const square = inner(plain, plain);
  const a = square > 1e-12 ? inner(clipped, plain) / square : NaN;
  const error = Number.isNaN(a) ? clipped : plus(clipped, plain, -a);
  const lengths = size(clipped) * size(plain);
  return { plain, clipped, k1, k2, bias, a, error, cosine: lengths > 1e-12 ? inner(clipped, plain) / lengths : NaN };
}

class ClippingWidget {
  constructor(host) {
    this.host = host;
    this.state = structuredClone(PRESETS.paper);
    this.svg = host.querySelector("svg");
    this.scene = node("g");
    this.handles = node("g");
    this.svg.append(this.scene, this.handles);
    this.grips = { g1: this.grip("g1"), g2: this.grip("g2"), c: this.grip("c") };
    this.slider = host.querySelector("input[type=range]");
    this.slider.addEventListener("input", () => this.set("c", Number(this.slider.value)));
    for (const button of host.querySelectorAll("[data-preset]")) {
      button.addEventListener("click", () => {
        this.state = structuredClone(PRESETS[button.dataset.preset]);
        this.draw();
      });
    }
    this.draw();
  }

  /** A handle that a pointer drags and the arrow keys move. */
  grip(name) {
    const handle = node("g", {
      tabindex: 0, class: `grip ${name}`, "data-grip": name, role: "slider",
      "aria-label": name === "c" ? "clipping norm C" : `gradient ${name.slice(1)}, move with the arrow keys`,
    });
    handle.append(node("circle", { r: 32, class: "hit" }), node("circle", { r: 10, class: "knob" }));
    handle.addEventListener("pointerdown", (event) => {
      handle.setPointerCapture(event.pointerId);
      event.preventDefault();
      handle.focus();
    });
    handle.addEventListener("pointermove", (event) => {
      if (handle.hasPointerCapture(event.pointerId)) this.drag(name, event);
    });
    handle.addEventListener("keydown", (event) => this.key(name, event));
    this.handles.append(handle);
    return handle;
  }

  drag(name, event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    const point = [at.x / 100, -at.y / 100];
    this.set(name, name === "c" ? size(point) : point);
  }

  key(name, event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const step = event.shiftKey ? 0.5 : 0.1;
    if (name === "c") this.set("c", this.state.c + step * (move[0] + move[1]));
    else this.set(name, plus(this.state[name], move, step));
  }

  set(name, value) {
    const held = (v, lo, hi) => Math.min(hi, Math.max(lo, v));
    this.state[name] = name === "c" ? held(value, ...C_RANGE) : value.map((v) => held(v, -REACH + 0.2, REACH - 0.2));
    this.draw();
  }

  draw() {
    const { g1, g2, c } = this.state;
    const now = clippingBias(this.state);
    const to = (v) => [v[0] * 100, -v[1] * 100];
    const vector = (from, end, kind, width) => arrow(...to(from), ...to(end), kind, width);
    const zero = [0, 0];
    this.scene.replaceChildren(
      node("line", { x1: -340, x2: 340, y1: 0, y2: 0, class: "grid" }),
      node("line", { y1: -340, y2: 340, x1: 0, x2: 0, class: "grid" }),
      node("circle", { r: c * 100, class: "clip-circle" }),
      vector(zero, g1, "sample", 3), vector(zero, g2, "sample", 3),
      vector(zero, now.k1, "cut", 5), vector(zero, now.k2, "cut", 5),
      vector(zero, now.plain, "gradient", 6), vector(zero, now.clipped, "clipped", 6),
      vector(now.plain, now.clipped, "bias", 6),
      node("circle", { r: 5, class: "origin" }),
      ...this.names(g1, g2, c, now, to),
    );
    this.place(g1, g2, c, to);
    this.tell(now);
  }

  names(g1, g2, c, now, to) {
    const beside = (v, text, kind, away) => {
      const length = size(v) || 1;
      const [x, y] = to(plus(v, v, away / length));
      return label(text, x, y + 6, `vector big halo middle ${kind}`);
    };
    const half = times(plus(now.plain, now.clipped), 0.5);
    const names = [
      beside(g1, "g₁", "sample", 0.32), beside(g2, "g₂", "sample", 0.32),
      label("C", c * 70.7 + 22, c * 70.7 + 26, "vector big soft"),
    ];
    if (size(now.plain) > 0.15) names.push(beside(now.plain, "ĝ", "gradient", 0.2));
    if (size(now.clipped) > 0.15) names.push(beside(now.clipped, "ĝ clipped", "clipped", -size(now.clipped) - 0.22));
    if (size(now.bias) > 0.25) {
      const centre = times(plus(now.plain, now.clipped), 1 / 3); // of the triangle 0, ĝ, ĝ clipped
      const normal = [-now.bias[1] / size(now.bias), now.bias[0] / size(now.bias)];
      const outwards = inner(normal, plus(half, centre, -1)) < 0 ? -1 : 1;
      const [x, y] = to(plus(half, normal, 0.36 * outwards));
      names.push(label("bias", x, y + 6, "vector big halo middle bias"));
    }
    return names;
  }

  place(g1, g2, c, to) {
    const rim = [c * Math.SQRT1_2, -c * Math.SQRT1_2];
    for (const [name, at] of [["g1", g1], ["g2", g2], ["c", rim]]) {
      const [x, y] = to(at);
      const grip = this.grips[name];
      grip.setAttribute("transform", `translate(${x},${y})`);
      const text = name === "c" ? `C is ${c.toFixed(2)}`
        : `right ${at[0].toFixed(1)}, up ${at[1].toFixed(1)}, length ${size(at).toFixed(2)}`;
      grip.setAttribute("aria-valuenow", (name === "c" ? c : size(at)).toFixed(2));
      grip.setAttribute("aria-valuetext", text);
    }
    this.slider.value = c;
  }

  tell(now) {
    const { g1, g2, c } = this.state;
    const cut = (g) => (size(g) > c + 1e-9 ? `${size(g).toFixed(2)}, cut to ${c.toFixed(2)}` : `${size(g).toFixed(2)}, kept`);
    const degrees = (Math.acos(Math.min(1, Math.max(-1, now.cosine))) * 180) / Math.PI;
    const bound = 0.5 * (Math.max(0, size(g1) - c) + Math.max(0, size(g2) - c));
    const facts = {
      g1: cut(g1), g2: cut(g2), c: c.toFixed(2), bias: size(now.bias).toFixed(2), bound: bound.toFixed(2),
      a: Number.isNaN(now.a) ? "undefined" : now.a.toFixed(2), error: size(now.error).toFixed(2),
      angle: Number.isNaN(degrees) ? "undefined" : `${degrees.toFixed(0)}°`,
    };
    for (const place of this.host.querySelectorAll("[data-fact]")) {
      place.textContent = facts[place.dataset.fact];
    }
  }
}
