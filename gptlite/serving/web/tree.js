// A text and its branches. A branch holds the tokens that it does not share with the one that it
// began in: `at` tokens of that one's path come before them.

export class Branch {
  constructor(parent = null, at = 0) {
    this.parent = parent;
    this.at = at;
    this.tokens = [];
    this.children = [];
    this.before = parent ? parent.before : []; // ids that have no text
    this.status = ""; // how it was made
    this.isScored = false;
    parent?.children.push(this);
  }

  /** All tokens from the beginning of the text. */
  path() {
    return this.parent ? [...this.parent.path().slice(0, this.at), ...this.tokens] : this.tokens;
  }

  get root() {
    return this.parent ? this.parent.root : this;
  }

  /** The branch to which token `i` of the path belongs. */
  owner(i) {
    return this.parent && i < this.at ? this.parent.owner(i) : this;
  }

  /** The branches that share the path before token `i`, and differ in it. */
  alternatives(i) {
    const owner = this.owner(i);
    if (owner.parent && i === owner.at) return owner.parent.alternatives(i);
    return [owner, ...owner.children.filter((child) => child.at === i)];
  }

  /** A new branch, with `token` in place `i`. */
  branch(i, token) {
    const made = new Branch(this.alternatives(i)[0], i);
    made.tokens.push(token);
    return made;
  }
}
