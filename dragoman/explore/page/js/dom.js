// Elements without markup strings.

// make('p.quiet', 'Text'), make('button.plain', { onclick: f }, 'Text'): a tag with classes, attributes if the next
// argument is a plain object, then children as in setChildren.
export function make(kind, ...children) {
  const [tag, ...classes] = kind.split('.');
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  const node = setAttributes(document.createElement(tag), {
    class: classes.join(' ') || null,
    type: tag === 'button' ? 'button' : null,
    ...attributes,
  });
  return setChildren(node, children);
}

// Replace the content of an element by texts, nodes and lists of them; null, undefined and false are left out.
export function setChildren(node, ...children) {
  node.replaceChildren(...children.flat(2).filter((child) => child !== false && (child ?? null) !== null));
  return node;
}

// Attributes by name; `onclick: f` adds a listener, `hidden: false` removes, `var: {p: 0.5}` sets custom properties.
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'var') {
      for (const [key, entry] of Object.entries(value)) node.style.setProperty(`--${key}`, entry);
    } else if (name.startsWith('aria-') && typeof value === 'boolean') node.setAttribute(name, value);
    else if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? '' : value);
  }
  return node;
}

export const byId = (id) => document.getElementById(id);

export const rootElement = document.documentElement;
