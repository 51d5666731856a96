// The keyboard: F6 between regions, arrows inside a widget, single letters while focus is in a widget, ? for help.
import { byId, make, setChildren } from './dom.js';
import { addTexts, translate } from './i18n.js';
import { hasModifier, isEnter, panelOf, termList } from './parts.js';

addTexts('keys', {
  note: ['Letters work inside a panel’s widget, never while you type.', '字母键只在面板部件内有效，打字时无效。'],
  f6: ['Next panel (with Shift: the one before)', '下一个面板（加 Shift：上一个）'],
  arrows: ['Move inside the text, the tree, the heads or a matrix', '在文字、树、各头或矩阵中移动'],
  enter: ['Select, or take the alternative', '选择，或采用这个备选'],
  space: ['Switch the head off or on', '关闭或打开这个头'],
  a: ['Alternatives of the selected token', '选中词元的备选'],
  m: ['Attention weights or contribution', '注意力权重或贡献'],
  layer: ['Layer before, layer after', '上一层，下一层'],
  head: ['Head before, head after', '上一个头，下一个头'],
  escape: ['Back to the translation', '回到译文'],
  help: ['This list', '这份列表'],
});

const KEYS_HELP = {
  F6: 'keys.f6',
  '← ↑ → ↓': 'keys.arrows',
  Enter: 'keys.enter',
  Space: 'keys.space',
  A: 'keys.a',
  B: 'beam.title',
  H: 'nav.heads',
  T: 'nav.token',
  M: 'keys.m',
  '[  ]': 'keys.layer',
  ',  .': 'keys.head',
  Escape: 'keys.escape',
  '?': 'keys.help',
};

const keysTyping = (target) => target.closest('input, textarea, select, [contenteditable]') !== null;

// One tab stop for many items: arrows, Home and End move the focus. Options:
//   items()     the focusable elements in order
//   rtl()       whether left means next
//   vertical    up and down move by one as well (a list)
//   onMove(el)  called with the element that gets the focus
//   onPress(el) called with the element that is clicked, or has the focus when Enter or the space bar is pressed
// Returns {focus(el), refresh()}: refresh after the items were made anew.
export function rovingFocus(container, { items, rtl, vertical, onMove, onPress }) {
  let current = null;
  const refresh = (wanted = current) => {
    const all = items();
    const isCurrent = (each) => each.matches('[aria-selected="true"], [aria-pressed="true"], [aria-current="true"]');
    current = all.includes(wanted) ? wanted : (all.find(isCurrent) ?? all[0]);
    for (const each of all) each.tabIndex = each === current ? 0 : -1;
  };
  const focus = (target) => {
    if (!target) return;
    refresh(target);
    target.focus();
    onMove?.(target);
  };
  container.addEventListener('focusin', ({ target }) => {
    if (target !== current && items().includes(target)) refresh(target);
  });
  container.addEventListener('keydown', (event) => {
    if (hasModifier(event) || keysTyping(event.target)) return;
    const all = items();
    const at = all.indexOf(event.target);
    if (at < 0) return;
    const forward = rtl?.() ? -1 : 1;
    const next = {
      ArrowRight: at + forward,
      ArrowLeft: at - forward,
      Home: 0,
      End: all.length - 1,
      ...(vertical && { ArrowDown: at + 1, ArrowUp: at - 1 }),
    }[event.key];
    if (next === undefined && !(onPress && isEnter(event))) return;
    event.preventDefault();
    if (next === undefined) onPress(event.target);
    else focus(all[next]);
  });
  if (onPress) {
    container.addEventListener('click', (event) => {
      const target = items().find((each) => each.contains(event.target));
      focus(target);
      if (target) onPress(target);
    });
  }
  refresh();
  return { focus, refresh };
}

function keysShowHelp() {
  const dialog = byId('help');
  const close = make('button.plain', { onclick: () => dialog.close() }, translate('page.close'));
  setChildren(dialog,
    make('h2', { id: 'help-title' }, translate('page.help')),
    make('p.quiet', translate('keys.note')),
    termList('keys', Object.entries(KEYS_HELP).map(([key, text]) => [make('kbd', key), translate(text)])),
    close,
  );
  if (!dialog.open) dialog.showModal();
  close.focus();
}

// `actions` maps a key ("a", "[") to a function; it runs while the focus is inside [data-widget].
export function connectKeys({ views, visit, actions }) {
  byId('tool-help').addEventListener('click', keysShowHelp);
  document.addEventListener('keydown', (event) => {
    const { key, target } = event;
    if (event.defaultPrevented || hasModifier(event)) return;
    let action = null;
    if (key === 'F6') {
      const shown = views.filter((view) => !panelOf(view).hidden);
      const at = shown.indexOf(document.activeElement?.closest('section.panel')?.id.replace('panel-', ''));
      action = () => visit(shown.at(event.shiftKey ? Math.max(at, 0) - 1 : (at + 1) % shown.length));
    } else if (!keysTyping(target) && !byId('help').open) {
      if (key === '?') action = keysShowHelp;
      else if (target.closest('[data-widget]')) action = actions[key.length === 1 ? key.toLowerCase() : key];
    }
    if (!action) return;
    event.preventDefault();
    action();
  });
}
