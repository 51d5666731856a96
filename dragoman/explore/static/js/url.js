// The selection as a URL fragment: #v=head&t=4&h=x3.2&off=x3.2,d0.1&z=0-31,0-31&tour=2&lang=zh
// Unknown keys are kept, invalid values are dropped; text is never part of it unless asked for.
import { INITIAL_STATE, parseHead } from './state.js';

export const VIEWS = ['ask', 'strip', 'beam', 'heads', 'head', 'token', 'positions', 'tour'];
const URL_SORTS = ['layer', 'effect', 'entropy', 'label'];
const URL_KNOWN = new Set([
  'v', 't', 's', 'h', 'n', 'off', 'sort', 'label', 'z', 'm', 'tour', 'lang', 'visual', 'time', 'e',
]);

function urlInteger(text, most = 1e7) {
  return /^\d{1,8}$/.test(text ?? '') && Number(text) <= most ? Number(text) : null;
}

function urlDecode(text) {
  try {
    return decodeURIComponent(text.replace(/\+/g, ' '));
  } catch {
    return '';
  }
}

function urlPairs(fragment) {
  return fragment
    .replace(/^#/, '')
    .split('&')
    .filter(Boolean)
    .map((part) => {
      const at = part.indexOf('=');
      const raw = at < 0 ? part : part.slice(0, at);
      return { key: urlDecode(raw), value: at < 0 ? '' : urlDecode(part.slice(at + 1)), part };
    });
}

// The whole state that a fragment describes; a key that it does not have has its initial value.
export function parseFragment(fragment) {
  const state = { ...INITIAL_STATE };
  for (const { key, value } of urlPairs(fragment)) {
    if (key === 'v' && VIEWS.includes(value)) state.view = value;
    else if (key === 't') state.step = urlInteger(value);
    else if (key === 's') state.src = urlInteger(value);
    else if (key === 'n') state.node = urlInteger(value);
    else if (key === 'h') {
      const parsed = parseHead(value);
      if (parsed) [state.site, state.head] = parsed;
    } else if (key === 'off') {
      const heads = value.split(',').filter(parseHead);
      if (heads.length) state.off = [...new Set(heads)].slice(0, 4096);
    } else if (key === 'sort' && URL_SORTS.includes(value)) state.sort = value;
    else if (key === 'label' && /^[\p{L}\p{N} _+-]{1,40}$/u.test(value)) state.label = value;
    else if (key === 'm' && value === 'contribution') state.measure = value;
    else if (key === 'z') {
      const match = /^(\d{1,6})-(\d{1,6}),(\d{1,6})-(\d{1,6})$/.exec(value);
      const zoom = match ? match.slice(1).map(Number) : null;
      if (zoom && zoom[0] <= zoom[1] && zoom[2] <= zoom[3]) state.zoom = zoom;
    } else if (key === 'tour') {
      const step = urlInteger(value, 8);
      if (step) state.tour = step;
    } else if (key === 'lang' && (value === 'en' || value === 'zh')) state.lang = value;
    else if (key === 'visual') state.visual = value === '1';
    else if (key === 'time') state.time = value === '1';
    else if (key === 'e' && /^[0-9a-f:]{8,80}$/.test(value)) state.e = value;
  }
  return state;
}

// The fragment of a state, with the unknown keys of the fragment before.
export function formatFragment(state, before = '') {
  const parts = [];
  const add = (key, value) => parts.push(`${key}=${value}`);
  if (state.view !== INITIAL_STATE.view) add('v', state.view);
  if (state.step !== null) add('t', state.step);
  if (state.src !== null) add('s', state.src);
  if (state.site !== null && state.head !== null) add('h', `${state.site}.${state.head}`);
  if (state.node !== null) add('n', state.node);
  if (state.off.length) add('off', state.off.join(','));
  if (state.sort !== INITIAL_STATE.sort) add('sort', state.sort);
  if (state.label) add('label', encodeURIComponent(state.label));
  if (state.measure !== INITIAL_STATE.measure) add('m', state.measure);
  if (state.zoom) add('z', `${state.zoom[0]}-${state.zoom[1]},${state.zoom[2]}-${state.zoom[3]}`);
  if (state.tour !== null) add('tour', state.tour);
  if (state.time) add('time', 1);
  if (state.visual) add('visual', 1);
  if (state.lang) add('lang', state.lang);
  if (state.e) add('e', state.e);
  for (const { key, part } of urlPairs(before)) if (!URL_KNOWN.has(key)) parts.push(part);
  return parts.join('&');
}

// What a link with text carries beside the selection: `text=`, which an opened page puts into its form.
export function fragmentText(fragment) {
  return urlPairs(fragment).find(({ key }) => key === 'text')?.value ?? '';
}

// Write the state to the address and read it back on back and forward. A browser allows few writes a second and each
// takes milliseconds, so moves of the cursor are written when they pause. Returns a function that writes at once.
// `fit(state)` takes out of a state what the shown explanation does not have.
export function connectUrl(store, fit, onNavigate) {
  let reading = false;
  let timer = 0;
  const write = (state, push = false) => {
    const fragment = formatFragment(state, location.hash);
    const address = `${location.pathname}${location.search}${fragment ? `#${fragment}` : ''}`;
    try {
      history[push ? 'pushState' : 'replaceState'](null, '', address);
    } catch {
      // A page without an address of its own (about:srcdoc in a notebook) keeps its state in memory.
    }
  };
  let last = store.get();
  const flush = () => {
    if (timer) write(last);
    clearTimeout(timer);
    timer = 0;
  };
  const read = () => {
    clearTimeout(timer);
    timer = 0;
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
      write(state, true);
    } else if (!timer) timer = setTimeout(flush, 150);
    last = state;
  });
  window.addEventListener('popstate', read);
  window.addEventListener('pagehide', flush);
  window.addEventListener('hashchange', () => {
    if (!timer && formatFragment(store.get(), location.hash) !== location.hash.slice(1)) read();
  });
  return flush;
}
