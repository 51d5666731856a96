// Start the page: load the explanation, mount the panels, keep selection, address and panels together.
//
// A panel is `mount<Name>(element, context)`: element is the section's .panel-body, context is
//   {store, api, current() -> ex, onExplanation(fn), announce(text), wait(promise), replace(ex), visit(view), fail(error), session}.
// A function given to onExplanation runs with every new explanation and again when the language changes,
// so strings made there are always in the page's language. A panel that the explanation's `missing`
// names is hidden behind that sentence; its listeners still run and must bear absent data.
import { byId, make, rootElement, setChildren } from './dom.js';
import { headName, parseHead, store, VIEWS } from './state.js';
import { connectUrl, formatFragment } from './url.js';
import { readIsland } from './data.js';
import { currentLanguage, setLanguage, setTask, translate } from './i18n.js';
import { api } from './api.js';
import { connectTheme } from './theme.js';
import { connectKeys } from './keys.js';
import { clamp, copyAddress, joinTexts, panelOf, scrollToPanel } from './parts.js';
import { mountAsk } from './ask.js';
import { mountTour } from './tour.js';
import { mountStrip } from './strip.js';
import { mountBeam } from './beam.js';
import { mountGrid } from './grid.js';
import { mountHead } from './head.js';
import { mountToken } from './token.js';
import { mountPositions } from './positions.js';

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

let mainExplanation = null;
const mainListeners = [];

const mainBody = (view) => panelOf(view).querySelector('.panel-body');

// The sections of the panels, in the order of the page.
function mainBuildPanels() {
  byId('main').append(...VIEWS.map((view) => make('section.panel', {
    id: `panel-${view}`, 'aria-labelledby': `title-${view}`, tabindex: -1,
  }, make('header', make('h2', { id: `title-${view}`, 'data-i18n': `${view}.title` }), make('p.purpose', { 'data-i18n': `${view}.purpose` })),
  make('div.panel-body'), make('p.missing', { hidden: true }))));
}

// One polite sentence for screen readers, after 300 ms without another.
let mainTimer = 0;
function mainAnnounce(text) {
  clearTimeout(mainTimer);
  mainTimer = setTimeout(() => {
    byId('live').textContent = text;
  }, 300);
}

// What a call answers; while it runs the page says so.
async function mainWait(answer) {
  const { dataset } = document.body;
  dataset.busy = translate('page.loading');
  mainAnnounce(dataset.busy);
  try {
    return await answer;
  } finally {
    delete dataset.busy;
  }
}

function mainShowError(error) {
  const banner = byId('page-error');
  banner.hidden = !error;
  banner.textContent = error ? translate('page.failed', { error: error.message }) : '';
}

// The state without what the explanation does not have: a step past the end, a head of another model.
function mainFit(ex, state) {
  if (!ex) return state;
  const below = (value, count = 0) => (value < count ? value : null);
  const isHead = (site, head) => head < (ex.site(site)?.heads ?? 0);
  return {
    ...state,
    step: below(state.step, ex.steps?.length),
    src: below(state.src, ex.source?.tokens?.length),
    node: below(state.node, ex.tensors[ex.beam?.nodes.parent]?.shape[0]),
    ...(!isHead(state.site, state.head) && { site: null, head: null, zoom: null }),
    off: state.off.filter((name) => isHead(...parseHead(name))),
    e: (api && ex.digest) || state.e,
  };
}

// Where nothing is selected: the token the model was least sure of and the head that reads its source word.
function mainChoose(ex) {
  let { step, site, head } = store.get();
  if (step === null && ex.steps?.length) {
    const isWord = (t) => ex.target.tokens[t]?.special === false && ex.target.tokens[t].text.trim();
    const words = [...ex.steps.keys()].filter(isWord);
    const free = words.filter((t) => !ex.steps[t].forced);
    [step = 0] = (free.length ? free : words).sort((a, b) => ex.steps[a].logprob - ex.steps[b].logprob);
  }
  if (site === null && ex.sites?.length) ({ site, head } = ex.strongestHead(step ?? 0) ?? { site: ex.sites[0].id, head: 0 });
  store.set({ step, site, head });
}

function mainShowMissing(ex) {
  for (const view of VIEWS.slice(2)) { // the tour and the request are always there
    const note = panelOf(view).querySelector('.missing');
    note.textContent = ex ? (ex.missing?.[view] ?? '') : translate('page.empty');
    note.hidden = !note.textContent;
    mainBody(view).hidden = !note.hidden && !(view === 'token' && ex?.attribution.length);
  }
}

function mainShowModel(ex) {
  const { path, name: given, family, layers, heads, d_model: width } = ex?.model ?? {};
  const name = path?.split(/[\\/]/).filter((part) => part && part !== '.').pop() || (path === '' ? translate('page.builtIn') : given);
  const counts = { layers: joinTexts([layers?.encoder, layers?.decoder], ' + '), heads, width };
  const facts = Object.entries(counts).map(([key, count]) => count && translate(`page.${key}`, { count }));
  setChildren(byId('model-line'),
    name && [make('strong', make('bdi', name)), ' · '],
    joinTexts([family, ...facts], ' · '),
  );
  if (name && api) document.title = translate('page.document', { model: name });
  const capture = ex?.checks?.capture?.toExponential(0);
  byId('foot-line').textContent = `${translate('page.foot')} ${capture ? translate('page.checks', { capture }) : ''}`;
}

function mainShowOff({ off }) {
  const clear = () => {
    store.set({ off: [] }, { push: true });
    mainAnnounce(translate('off.cleared'));
  };
  const banner = byId('off-banner');
  banner.hidden = !off.length;
  setChildren(banner,
    make('span', translate('off.banner', { heads: off.join(', ') })),
    make('button.plain', { onclick: clear }, translate('off.clear')),
  );
}

// Attribute the selected token, where the text was too long for attributing all of them.
let mainAsking = false;
async function mainAttribute() {
  const ex = mainExplanation;
  const { step } = store.get();
  if (!api || mainAsking || !ex?.pending.delete(step)) return;
  mainAsking = true;
  await api.attribute(ex.model.attributions[0], step).then((found) => ex.addAttribution(found, step), mainShowError);
  mainAsking = false;
  if (mainExplanation) store.renew('step');
}

function mainNotify() {
  mainShowModel(mainExplanation);
  mainShowMissing(mainExplanation);
  if (mainExplanation) for (const listener of mainListeners) listener(mainExplanation);
  mainAttribute();
}

// The tour is about a translation; other tasks have their own words.
function mainSetTask(task = 'translate') {
  setTask(task);
  setLanguage(store.get().lang);
  panelOf('tour').hidden = task !== 'translate';
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
  const state = store.get();
  const link = (view) => make('li', make('a', {
    href: `#${formatFragment({ ...state, view })}`,
    'aria-current': view === state.view || null,
    onclick: (event) => {
      event.preventDefault();
      mainVisit(view);
    },
  }, translate(`nav.${view}`)));
  setChildren(byId('panel-nav'), make('ul', VIEWS.filter((view) => !panelOf(view).hidden).map(link)));
}

// Go to a panel: its first tab stop gets the focus, or the panel itself.
function mainVisit(view) {
  store.set({ view }, { push: true });
  const stop = panelOf(view).querySelector('[data-widget] [tabindex="0"], [data-widget][tabindex="0"]');
  (stop?.offsetParent ? stop : panelOf(view)).focus({ preventScroll: true });
  scrollToPanel(view);
}

// The next head or layer of the selected head's group, for the keys [ ] , .
function mainMoveHead(layers, heads) {
  const ex = mainExplanation;
  if (!ex?.sites?.length) return;
  const state = store.get();
  const here = ex.site(state.site) ?? ex.sites[0];
  const group = ex.sites.filter((site) => site.group === here.group);
  const site = group[clamp(group.indexOf(here) + layers, 0, group.length - 1)];
  const head = clamp((state.head ?? 0) + heads, 0, site.heads - 1);
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
  wait: mainWait,
  replace: mainReplace,
  visit: mainVisit,
  fail: mainShowError,
  session: null,
};

async function mainLoad() {
  const island = byId('explanation');
  if (island) return readIsland(island);
  const session = await api.session();
  mainContext.session = session;
  mainSetTask(session.task);
  const digest = store.get().e || session.explanation;
  if (!digest) return null;
  return api.load(digest).catch((error) => {
    // A link to an explanation that the server no longer keeps: show its current one.
    if (session.explanation === digest) throw error;
    if (session.explanation) return api.load(session.explanation);
    mainShowError(error);
    return null;
  });
}

// Back and forward to another explanation: load it, then take over what the address selects in it.
async function mainNavigate(wanted) {
  if (!api || !wanted.e || !mainExplanation || wanted.e === mainExplanation.digest) return;
  try {
    const ex = await api.load(wanted.e);
    mainExplanation = null;
    store.set(mainFit(ex, wanted));
    mainReplace(ex, { push: false });
  } catch (error) {
    mainShowError(error);
  }
}

async function mainStart() {
  mainBuildPanels();
  const flush = connectUrl(store, (state) => mainFit(mainExplanation, state), mainNavigate);
  setLanguage(store.get().lang);
  const language = byId('tool-lang');
  const nameTheme = connectTheme(byId('tool-theme'));
  const other = () => (currentLanguage() === 'zh' ? 'en' : 'zh');
  const nameLanguage = () => {
    language.textContent = translate('page.language');
    language.lang = other() === 'zh' ? 'zh-Hans' : 'en';
  };
  language.addEventListener('click', () => store.set({ lang: other() }));
  byId('tool-link').addEventListener('click', () => {
    flush();
    copyAddress(location.href, mainAnnounce);
  });
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
    if (changed.has('step')) mainAttribute();
    mainShowNav();
  });
  connectKeys({
    views: VIEWS,
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
  if (store.get().view !== 'strip') scrollToPanel(store.get().view);
  rootElement.dataset.ready = 'true';
}

mainStart();
