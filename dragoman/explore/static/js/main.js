// Start the page: load the explanation, mount the panels, keep selection, address and panels together.
//
// A panel is `mount<Name>(element, context)`: element is the section's .panel-body, context is
//   {store, api, current() -> ex, onExplanation(fn), announce(text), replace(ex), visit(view)}.
// A function given to onExplanation runs with every new explanation and again when the language changes,
// so strings made there are always in the page's language. A panel that the explanation's `missing`
// names is hidden behind that sentence; its listeners still run and must bear absent data.
import { store, headName } from './state.js';
import { connectUrl, formatFragment, VIEWS } from './url.js';
import { decodeExplanation, readIsland } from './data.js';
import { addStrings, currentLanguage, setLanguage, setTask, translate } from './i18n.js';
import { api } from './api.js';
import { element } from './dom.js';
import { connectTheme } from './theme.js';
import { connectKeys } from './keys.js';
import { mountAsk } from './ask.js';
import { mountTour } from './tour.js';
import { mountStrip } from './strip.js';
import { mountBeam } from './beam.js';
import { mountGrid } from './grid.js';
import { mountHead } from './head.js';
import { mountToken } from './token.js';
import { mountPositions } from './positions.js';

addStrings(
  { 'page.empty': 'Nothing to show yet: type a sentence and translate it.' },
  { 'page.empty': '还没有内容：请输入一个句子并翻译。' },
);

const MOUNTS = {
  ask: mountAsk,
  tour: mountTour,
  strip: mountStrip,
  beam: mountBeam,
  heads: mountGrid,
  head: mountHead,
  token: mountToken,
  positions: mountPositions,
};

const MAIN_ORDER = ['tour', 'ask', 'strip', 'beam', 'heads', 'head', 'token', 'positions'];

let mainExplanation = null;
const mainListeners = [];

function mainBody(view) {
  return document.querySelector(`#panel-${view} .panel-body`);
}

// One polite sentence for screen readers, after 300 ms without another.
let mainTimer = 0;
function mainAnnounce(text) {
  clearTimeout(mainTimer);
  mainTimer = setTimeout(() => {
    document.getElementById('live').textContent = text;
  }, 300);
}

function mainShowError(error) {
  const banner = document.getElementById('page-error');
  banner.hidden = !error;
  banner.textContent = error ? translate('page.failed', { error: error.message ?? String(error) }) : '';
}

// The state without what the explanation does not have: a step past the end, a head of another model.
function mainFit(ex, state) {
  if (!ex) return state;
  const below = (value, count) => (value !== null && value >= count ? null : value);
  const nodes = ex.beam ? (ex.tensors[ex.beam.nodes.parent]?.shape[0] ?? 0) : 0;
  const known = (site, head) => site !== null && head < (ex.site(site)?.heads ?? 0);
  const isHead = known(state.site, state.head);
  return {
    ...state,
    step: below(state.step, ex.steps?.length ?? 0),
    src: below(state.src, ex.source?.tokens?.length ?? 0),
    node: below(state.node, nodes),
    site: isHead ? state.site : null,
    head: isHead ? state.head : null,
    zoom: isHead ? state.zoom : null,
    off: state.off.filter((name) => {
      const at = name.lastIndexOf('.');
      return known(name.slice(0, at), Number(name.slice(at + 1)));
    }),
    e: api && ex.digest ? ex.digest : state.e,
  };
}

// Where nothing is selected: the token the model was least sure of and the head that reads its source word.
function mainChoose(ex) {
  const state = store.get();
  const patch = {};
  if (state.step === null && ex.steps?.length) {
    const words = ex.steps.map((_, t) => t).filter((t) => ex.target.tokens[t]?.special === false && ex.target.tokens[t].text.trim());
    const free = words.filter((t) => !ex.steps[t].forced);
    const [first] = (free.length ? free : words).sort((a, b) => ex.steps[a].logprob - ex.steps[b].logprob);
    patch.step = first ?? 0;
  }
  if (state.site === null && ex.sites?.length) {
    const head = ex.strongestHead(patch.step ?? state.step ?? 0);
    patch.site = head?.site ?? ex.sites[0].id;
    patch.head = head?.head ?? 0;
  }
  store.set(patch);
}

function mainShowMissing(ex) {
  for (const view of MAIN_ORDER) {
    const note = document.querySelector(`#panel-${view} > .missing`);
    if (!note) continue;
    const sentence = ex ? (ex.missing?.[view] ?? '') : translate('page.empty');
    note.textContent = sentence;
    note.hidden = !sentence;
    mainBody(view).hidden = Boolean(sentence);
  }
}

function mainShowModel(ex) {
  const model = ex?.model ?? {};
  const layers = model.layers ?? {};
  const name = (model.path ?? '').split(/[\\/]/).filter((part) => part && part !== '.').pop() || model.name;
  document.getElementById('model-line').replaceChildren(
    ...(name ? [element('strong', {}, element('bdi', {}, name)), ' · '] : []),
    translate('page.model', {
      family: model.family ?? '',
      encoder: layers.encoder,
      decoder: layers.decoder,
      heads: model.heads,
      width: model.d_model,
    }),
  );
  if (name && api) document.title = translate('page.document', { model: name });
  const checks = ex?.checks?.capture;
  document.getElementById('foot-line').textContent = [
    translate('page.foot'),
    typeof checks === 'number' ? translate('page.checks', { capture: checks.toExponential(0) }) : '',
  ].join(' ');
}

function mainShowOff(state) {
  const banner = document.getElementById('off-banner');
  banner.hidden = !state.off.length;
  if (banner.hidden) return;
  const clear = () => {
    store.set({ off: [] }, { push: true });
    mainAnnounce(translate('off.cleared'));
  };
  banner.replaceChildren(
    element('span', {}, translate('off.banner', { count: state.off.length, heads: state.off.join(', ') })),
    element('button', { type: 'button', class: 'plain', onclick: clear }, translate('off.clear')),
  );
}

function mainNotify() {
  mainShowModel(mainExplanation);
  mainShowMissing(mainExplanation);
  if (mainExplanation) for (const listener of mainListeners) listener(mainExplanation);
}

// The tour is about a translation; other tasks have their own words.
function mainSetTask(task = 'translate') {
  setTask(task);
  setLanguage(store.get().lang);
  document.getElementById('panel-tour').hidden = task !== 'translate';
  mainShowNav();
}

// Show another explanation in all panels; `push` makes it a step of the history.
function mainReplace(ex, { push = true } = {}) {
  mainSetTask(ex.model?.task);
  // Panels see current() === null while the selection is made to fit, then build themselves once.
  mainExplanation = null;
  mainShowError(null);
  if (api) {
    api.use(ex.digest);
    store.set({ e: ex.digest }, { push: push && store.get().e !== '' });
  }
  store.set(mainFit(ex, store.get()));
  mainChoose(ex);
  mainExplanation = ex;
  mainNotify();
}

function mainShowNav() {
  const nav = document.getElementById('panel-nav');
  const { view } = store.get();
  const shown = MAIN_ORDER.filter((each) => !document.getElementById(`panel-${each}`).hidden);
  nav.replaceChildren(element('ul', {}, shown.map((each) =>
    element('li', {}, element('a', {
      href: `#${formatFragment({ ...store.get(), view: each })}`,
      'aria-current': each === view ? 'true' : null,
      onclick: (event) => {
        event.preventDefault();
        mainVisit(each);
      },
    }, translate(`nav.${each}`))))));
}

function mainScroll(view) {
  const panel = document.getElementById(`panel-${view}`);
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  panel.scrollIntoView({ block: 'start', behavior: calm ? 'instant' : 'smooth' });
}

// Go to a panel: its first tab stop gets the focus, or the panel itself.
function mainVisit(view) {
  store.set({ view }, { push: true });
  const panel = document.getElementById(`panel-${view}`);
  const stop = panel.querySelector('[data-widget] [tabindex="0"], [data-widget][tabindex="0"]');
  (stop && stop.offsetParent !== null ? stop : panel).focus({ preventScroll: true });
  mainScroll(view);
}

// The next head or layer of the selected head's group, for the keys [ ] , .
function mainMoveHead(layers, heads) {
  const ex = mainExplanation;
  const state = store.get();
  if (!ex?.sites?.length) return;
  const here = ex.site(state.site) ?? ex.sites[0];
  const group = ex.sites.filter((site) => site.group === here.group);
  const site = group[Math.max(0, Math.min(group.length - 1, group.indexOf(here) + layers))];
  const head = Math.max(0, Math.min(site.heads - 1, (state.head ?? 0) + heads));
  store.set({ site: site.id, head, zoom: site === here ? state.zoom : null });
  mainAnnounce(headName(site.id, head));
}

const mainContext = {
  store,
  api,
  current: () => mainExplanation,
  onExplanation(listener) {
    mainListeners.push(listener);
    if (mainExplanation) listener(mainExplanation);
  },
  announce: mainAnnounce,
  replace: mainReplace,
  visit: mainVisit,
  fail: mainShowError,
  session: null,
};

let mainFlush = () => {};

async function mainCopyLink() {
  mainFlush();
  const say = (key) => mainAnnounce(translate(key));
  try {
    await navigator.clipboard.writeText(location.href);
    say('page.copied');
  } catch {
    say('page.copyFailed');
  }
}

async function mainLoad() {
  const island = document.getElementById('explanation');
  if (island) return decodeExplanation(await readIsland(island));
  mainContext.session = await api.session();
  mainSetTask(mainContext.session.task);
  const digest = store.get().e || mainContext.session.explanation;
  if (!digest) return null;
  try {
    return decodeExplanation(await api.load(digest));
  } catch (error) {
    // A link to an explanation that the server no longer keeps: show its current one.
    const other = mainContext.session.explanation;
    if (!other || other === digest) throw error;
    return decodeExplanation(await api.load(other));
  }
}

// Back and forward to another explanation: load it, then take over what the address selects in it.
async function mainNavigate(wanted) {
  if (!api || !wanted.e || !mainExplanation || wanted.e === mainExplanation.digest) return;
  try {
    const ex = decodeExplanation(await api.load(wanted.e));
    mainExplanation = null;
    store.set(mainFit(ex, wanted));
    mainReplace(ex, { push: false });
  } catch (error) {
    mainShowError(error);
  }
}

async function mainStart() {
  mainFlush = connectUrl(store, (state) => mainFit(mainExplanation, state), mainNavigate);
  setLanguage(store.get().lang);
  const language = document.getElementById('tool-lang');
  const nameTheme = connectTheme(document.getElementById('tool-theme'));
  const nameLanguage = () => {
    language.textContent = translate('page.language');
    language.lang = currentLanguage() === 'zh' ? 'en' : 'zh-Hans';
  };
  language.addEventListener('click', () => {
    store.set({ lang: currentLanguage() === 'zh' ? 'en' : 'zh' });
  });
  document.getElementById('tool-link').addEventListener('click', mainCopyLink);
  document.querySelector('.skip').addEventListener('click', (event) => {
    event.preventDefault();
    mainVisit('strip');
  });
  store.subscribe((state, changed) => {
    if (changed.has('lang')) {
      setLanguage(state.lang);
      nameLanguage();
      nameTheme();
      mainNotify();
    }
    if (changed.has('off') || changed.has('lang')) mainShowOff(state);
    mainShowNav();
  });
  connectKeys({
    views: MAIN_ORDER,
    visit: mainVisit,
    actions: {
      a: () => document.dispatchEvent(new CustomEvent('explorer:alternatives')),
      b: () => mainVisit('beam'),
      h: () => mainVisit('heads'),
      t: () => mainVisit('token'),
      m: () => store.set({ measure: store.get().measure === 'weights' ? 'contribution' : 'weights' }),
      '[': () => mainMoveHead(-1, 0),
      ']': () => mainMoveHead(1, 0),
      ',': () => mainMoveHead(0, -1),
      '.': () => mainMoveHead(0, 1),
      Escape: () => mainVisit('strip'),
    },
  });
  nameLanguage();
  mainShowNav();
  mainNotify();
  try {
    const ex = await mainLoad();
    for (const [view, mount] of Object.entries(MOUNTS)) mount(mainBody(view), mainContext);
    if (ex) mainReplace(ex, { push: false });
  } catch (error) {
    mainShowError(error);
    throw error;
  }
  mainShowOff(store.get());
  if (store.get().view !== 'strip') mainScroll(store.get().view);
  document.documentElement.dataset.ready = 'true';
}

mainStart();
