// The selection as a URL fragment: #v=head&t=4&h=x3.2&off=x3.2,d0.1&z=0-31,0-31&tour=2&lang=zh
// Unknown keys are kept, invalid values are dropped; text is never part of it unless asked for.
import { INITIAL_STATE, parseHead, VIEWS } from './state.js';

const URL_INDEX = /^\d{1,7}$/;

// Key in the address -> key of the state, valid texts, and how to read a text if it is not the value itself.
const URL_KEYS = {
  v: ['view', RegExp(`^(${VIEWS.join('|')})$`)],
  t: ['step', URL_INDEX, Number],
  s: ['src', URL_INDEX, Number],
  h: ['site', /./],
  n: ['node', URL_INDEX, Number],
  off: ['off', /./, (text) => [...new Set(text.split(',').filter(parseHead))].slice(0, 4096)],
  sort: ['sort', /^(layer|effect|entropy|label)$/],
  label: ['label', /^[\p{L}\p{N} _+-]{1,40}$/u],
  m: ['measure', /^contribution$/],
  z: ['zoom', /^\d{1,6}-\d{1,6},\d{1,6}-\d{1,6}$/, (text) => {
    const zoom = text.split(/[-,]/).map(Number);
    return zoom[0] <= zoom[1] && zoom[2] <= zoom[3] ? zoom : null;
  }],
  tour: ['tour', /^[1-8]$/, Number],
  time: ['time', /^1$/, Boolean],
  visual: ['visual', /^1$/, Boolean],
  lang: ['lang', /^(en|zh)$/],
  e: ['e', /^[0-9a-f:]{8,80}$/],
};

function urlDecode(text) {
  try {
    return decodeURIComponent(text.replace(/\+/g, ' '));
  } catch {
    return '';
  }
}

function urlPairs(fragment) {
  return fragment.replace(/^#/, '').split('&').filter(Boolean).map((part) => {
    const [, key, value = ''] = /^([^=]*)=?(.*)$/s.exec(part);
    return { key: urlDecode(key), value: urlDecode(value), part };
  });
}

// The whole state that a fragment describes; a key that it does not have has its initial value.
export function parseFragment(fragment) {
  const state = { ...INITIAL_STATE };
  for (const { key, value } of urlPairs(fragment)) {
    const [name, valid, read = String] = Object.hasOwn(URL_KEYS, key) ? URL_KEYS[key] : [];
    if (key === 'h') [state.site, state.head] = parseHead(value) ?? [state.site, state.head];
    else if (valid?.test(value)) state[name] = read(value);
  }
  return state;
}

// The fragment of a state, with the unknown keys of the fragment before.
export function formatFragment(state, before = '') {
  const write = {
    site: (site) => `${site}.${state.head}`,
    label: encodeURIComponent,
    zoom: ([q0, q1, k0, k1]) => `${q0}-${q1},${k0}-${k1}`,
    time: Number,
    visual: Number,
  };
  const parts = [];
  for (const [key, [name]] of Object.entries(URL_KEYS)) {
    const value = state[name];
    if (String(value) !== String(INITIAL_STATE[name])) parts.push(`${key}=${write[name]?.(value) ?? value}`);
  }
  const unknown = urlPairs(before).filter(({ key }) => !Object.hasOwn(URL_KEYS, key));
  return [...parts, ...unknown.map(({ part }) => part)].join('&');
}

// What a link with text carries beside the selection: `text=`, which an opened page puts into its form.
export const fragmentText = (fragment) => urlPairs(fragment).find(({ key }) => key === 'text')?.value ?? '';

// Write the state to the address and read it back on back and forward. A browser allows few writes a second and each
// takes milliseconds, so moves of the cursor are written when they pause. Returns a function that writes at once.
// `fit(state)` takes out of a state what the shown explanation does not have.
export function connectUrl(store, fit, onNavigate) {
  let reading = false;
  let timer = 0;
  let last = store.get();
  const write = (state, method = 'replaceState') => {
    const fragment = formatFragment(state, location.hash);
    try {
      history[method](null, '', `${location.pathname}${location.search}${fragment && `#${fragment}`}`);
    } catch {
      // A page without an address of its own (about:srcdoc in a notebook) keeps its state in memory.
    }
  };
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
  };
  const flush = () => {
    if (timer) write(last);
    stop();
  };
  const read = () => {
    stop();
    const wanted = parseFragment(location.hash);
    reading = true;
    try {
      store.set(fit(wanted));
    } finally {
      reading = false;
      last = store.get();
    }
    onNavigate(wanted);
  };
  store.set(parseFragment(location.hash));
  store.subscribe((state, changed, { push }) => {
    if (reading) return;
    if (push) {
      flush();
      write(state, 'pushState');
    } else timer ||= setTimeout(flush, 150);
    last = state;
  });
  window.addEventListener('popstate', read);
  window.addEventListener('pagehide', flush);
  window.addEventListener('hashchange', () => {
    if (!timer && formatFragment(store.get(), location.hash) !== location.hash.slice(1)) read();
  });
  return flush;
}
