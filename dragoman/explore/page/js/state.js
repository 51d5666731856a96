// The one selection that every panel reads and any panel may change.
//
//   step     target token that is selected (index into ex.target.tokens and ex.steps), or null
//   src      source token that is selected, or null
//   site     attention site ("x3"), or null;  head: its head (2), or null
//   node     node of the beam tree, or null
//   off      heads that are switched off: ["x3.2", "d0.1"]
//   view     panel last visited, one of VIEWS
//   sort     order of the heads: "layer" | "effect" | "entropy" | "label";  label: only heads with it, or ""
//   zoom     [q0, q1, k0, k1] (inclusive) of the head's matrix, or null
//   measure  "weights" | "contribution"
//   tour     step of the tour, 1 to 8, or null
//   lang     "en" | "zh", or "" for the browser's language
//   visual   matrix axes in visual order (right-to-left text is mirrored)
//   time     show only what was known when token `step` was predicted
//   e        digest of the explanation (served pages), or ""

export const VIEWS = ['tour', 'ask', 'strip', 'beam', 'heads', 'head', 'token', 'positions'];

export const INITIAL_STATE = Object.freeze({
  step: null,
  src: null,
  site: null,
  head: null,
  node: null,
  off: [],
  view: 'strip',
  sort: 'layer',
  label: '',
  zoom: null,
  measure: 'weights',
  tour: null,
  lang: '',
  visual: false,
  time: false,
  e: '',
});

function createStore() {
  let state = { ...INITIAL_STATE };
  const listeners = [];
  return {
    get: () => state,
    // Change some keys and notify listeners once; `push` makes the change a step of the history.
    set(patch, { push = false } = {}) {
      const differs = (key) => JSON.stringify(state[key]) !== JSON.stringify(patch[key]);
      const changed = new Set(Object.keys(patch).filter(differs));
      if (!changed.size) return;
      state = { ...state, ...patch };
      for (const listener of listeners) listener(state, changed, { push });
    },
    subscribe: (listener) => listeners.push(listener),
    // Show again what depends on a key, as if it had changed.
    renew(key) {
      for (const listener of listeners) listener(state, new Set([key]), {});
    },
  };
}

export const store = createStore();

export const headName = (site, head) => `${site}.${head}`;

// "x3.2" -> ["x3", 2]; null where it is not a head.
export function parseHead(name) {
  const match = /^([a-z][a-z0-9_]{0,15})\.(\d{1,4})$/.exec(name);
  return match && [match[1], Number(match[2])];
}
