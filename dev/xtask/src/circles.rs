//! Circles of files: files of a crate that import one another, directly or through others.
//!
//! ```text
//!   src/**.rs ─► tokens ─► mod x;            files of the crate; those of tests are left out
//!                      ├─► use a::{b, c};    names, and the paths they stand for
//!                      └─► crate::a::b       ┐ resolved through re-exports to the file that
//!                                            ┘ defines the item ──► edges ─► circles
//! ```
//!
//! A module may use its descendants and its ancestors: these edges do not count. A path in a string
//! (`serde`'s `with`) and a re-export by `*` are not followed.
//!
//! Invariant: a circle is a fault, without exception (`a_circle_is_found_and_a_chain_is_not`).

mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::Result;

use self::source::{Import, Source};
use crate::files::files;

/// The module that a file holds, by its path in the crate; empty for the root.
type Module = Vec<String>;

/// The texts of a crate's files, by their paths below `src`.
type Files = BTreeMap<String, String>;

/// The files of a circle, each with those of the circle that it imports.
type Circle = BTreeMap<String, BTreeSet<String>>;

/// Most re-exports that a path leads through.
const REEXPORTS_MAX: usize = 16;

/// The circles of all crates.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let mut crates: BTreeMap<String, Files> = BTreeMap::new();
    for path in files(root)? {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        let Some((folder, file)) = name.split_once("/src/").filter(|_| name.ends_with(".rs"))
        else {
            continue;
        };
        let text = fs::read_to_string(&path)?;
        crates.entry(folder.to_owned()).or_default().insert(file.to_owned(), text);
    }
    let complaints = crates.iter().flat_map(|(folder, files)| {
        circles(files).into_iter().map(move |circle| complaint(folder, &circle))
    });
    Ok(complaints.collect())
}

fn complaint(folder: &str, circle: &Circle) -> String {
    let edges = circle.iter().map(|(file, targets)| {
        let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
        format!("{file} ──► {}", targets.join(", "))
    });
    format!(
        "{folder}/src: {} files import one another: move the item that closes the circle to the \
         file where it belongs\n    {}",
        circle.len(),
        edges.collect::<Vec<_>>().join("\n    ")
    )
}

/// The circles of one crate.
fn circles(files: &Files) -> Vec<Circle> {
    let is_root = |file: &&String| {
        matches!(file.as_str(), "lib.rs" | "main.rs")
            || file.strip_prefix("bin/").is_some_and(|program| !program.contains('/'))
    };
    files.keys().filter(is_root).flat_map(|root| Tree::of(files, root).circles()).collect()
}

/// The modules of a library or program.
struct Tree<'a> {
    modules: BTreeMap<Module, (&'a str, Source<'a>)>,
}

impl<'a> Tree<'a> {
    /// The modules that the file `root` declares, and those that they declare.
    fn of(files: &'a Files, root: &'a str) -> Self {
        let mut modules = BTreeMap::new();
        let mut open = vec![(Module::new(), root)];
        while let Some((module, file)) = open.pop() {
            let Some(text) = files.get(file) else { continue };
            let source = Source::parse(text);
            let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
            let stem = name.trim_end_matches(".rs");
            let folder = match (module.is_empty() || stem == "mod", folder) {
                (true, folder) => folder.to_owned(),
                (false, "") => stem.to_owned(),
                (false, folder) => format!("{folder}/{stem}"),
            };
            for child in &source.children {
                let below = |name: &str| format!("{folder}/{name}").trim_matches('/').to_owned();
                let places = [below(&format!("{child}.rs")), below(&format!("{child}/mod.rs"))];
                let found = places.iter().find_map(|place| files.get_key_value(place));
                open.extend(found.map(|(file, _)| (joined(&module, [*child]), file.as_str())));
            }
            modules.insert(module, (file, source));
        }
        Self { modules }
    }

    fn circles(&self) -> Vec<Circle> {
        let edges: BTreeMap<&Module, BTreeSet<&Module>> =
            self.modules.keys().map(|module| (module, self.targets(module))).collect();
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            edges.keys().map(|module| (*module, reached(&edges, module))).collect();
        let mut circles = BTreeSet::new();
        for (module, targets) in &reached {
            let mutual = targets.iter().copied().filter(|it| reached[it].contains(module));
            circles.insert(mutual.collect::<BTreeSet<&Module>>());
        }
        let file = |module: &Module| self.modules[module].0.to_owned();
        let shown = |circle: &BTreeSet<&Module>| {
            let inside =
                |of: &Module| edges[of].intersection(circle).map(|target| file(target)).collect();
            circle.iter().map(|module| (file(module), inside(module))).collect()
        };
        circles.iter().filter(|circle| circle.len() > 1).map(shown).collect()
    }

    /// The modules with the items that `module` uses, without its ancestors and descendants.
    fn targets(&self, module: &Module) -> BTreeSet<&Module> {
        let source = &self.modules[module].1;
        let imports = source.imports.iter().map(|import| (&import.scope, &import.path));
        let paths = source.paths.iter().map(|path| (&path.scope, &path.path));
        let used = imports.chain(paths).filter_map(|(scope, path)| {
            let path = self.absolute(module, scope, path, 0)?;
            self.definer(&path, 0)
        });
        used.filter(|it| !it.starts_with(module) && !module.starts_with(it)).collect()
    }

    /// The path from the crate's root of `path` in `module`; `None` for one of another crate.
    fn absolute(
        &self,
        module: &Module,
        scope: &[&str],
        path: &[&str],
        depth: usize,
    ) -> Option<Module> {
        let mut base = joined(module, scope.iter().copied());
        match path.split_first()? {
            (&"crate", rest) => Some(joined(&Module::new(), rest.iter().copied())),
            (&"self", rest) => Some(joined(&base, rest.iter().copied())),
            (&"super", _) => {
                let rest: Vec<&str> =
                    path.iter().copied().skip_while(|it| *it == "super").collect();
                base.truncate(base.len().checked_sub(path.len() - rest.len())?);
                Some(joined(&base, rest))
            }
            (first, rest) => {
                if self.modules.contains_key(&joined(&base, [*first])) {
                    return Some(joined(&base, path.iter().copied()));
                }
                let import = self.import(module, scope, first)?;
                // `use name::name` of another crate names itself.
                let path: Vec<&str> = import.path.iter().chain(rest).copied().collect();
                (depth < REEXPORTS_MAX)
                    .then(|| self.absolute(module, scope, &path, depth + 1))
                    .flatten()
            }
        }
    }

    fn import(&self, module: &Module, scope: &[&str], name: &str) -> Option<&Import<'a>> {
        let imports = &self.modules.get(module)?.1.imports;
        imports.iter().find(|import| import.name == name && import.scope == scope)
    }

    /// The module whose file defines the item at `path`; `None` for a module, which is used by the
    /// paths that begin with its name.
    fn definer(&self, path: &[String], depth: usize) -> Option<&Module> {
        let mut at = Module::new();
        for (index, name) in path.iter().enumerate() {
            let (child, rest) = (joined(&at, [name.as_str()]), &path[index + 1..]);
            let import = self.import(&at, &[], name);
            // A function can have the name of its module.
            if self.modules.contains_key(&child) && !(rest.is_empty() && import.is_some()) {
                at = child;
                continue;
            }
            let target = import.and_then(|import| self.absolute(&at, &[], &import.path, 0));
            return match target {
                Some(target) if depth < REEXPORTS_MAX => {
                    let rest = rest.iter().map(String::as_str);
                    self.definer(&joined(&target, rest), depth + 1)
                }
                _ => self.modules.get_key_value(&at).map(|(module, _)| module),
            };
        }
        None
    }
}

fn joined<'s>(module: &[String], names: impl IntoIterator<Item = &'s str>) -> Module {
    module.iter().cloned().chain(names.into_iter().map(str::to_owned)).collect()
}

/// Everything that `start` leads to; also itself if it is in a circle.
fn reached<'m>(
    edges: &BTreeMap<&'m Module, BTreeSet<&'m Module>>,
    start: &Module,
) -> BTreeSet<&'m Module> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![start]);
    while let Some(module) = open.pop() {
        for target in &edges[module] {
            if reached.insert(*target) {
                open.push(target);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::{Files, circles};

    fn tree(files: &[(&str, &str)]) -> Files {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    /// The files of each circle.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let circles = circles(&tree(files));
        circles.iter().map(|it| it.keys().cloned().collect::<Vec<_>>().join(" ")).collect()
    }

    const ROOT: (&str, &str) = ("lib.rs", "mod a; mod b; mod c; pub use a::{A as First};");
    const A: (&str, &str) = ("a.rs", "use crate::b::B; pub struct A(B);");
    const B: (&str, &str) = ("b.rs", "pub struct B; fn f() { super::c::g::<u8>() }");
    const LAST: (&str, &str) = ("c.rs", "pub fn g() {}");

    #[test]
    fn a_circle_is_found_and_a_chain_is_not() {
        assert_eq!(found(&[ROOT, A, B, LAST]), [""; 0]);
        for back in [
            "use crate::a::A;",
            "use super::{self as up, a::{A, self}};",
            "fn g() -> crate::a::A { todo }",
            "use crate::First;",
            "use crate as root; fn g(_: root::First) {}",
            "use crate::a; fn g(_: a::A) {}",
            "mod inner { use super::super::a::A; }",
            "fn g() { let c = '\"'; crate::a::f::<'x'>(c) } // \"",
        ] {
            assert_eq!(found(&[ROOT, A, B, ("c.rs", back)]), ["a.rs b.rs c.rs"], "{back}");
        }
    }

    #[test]
    fn comments_strings_tests_and_other_crates_do_not_count() {
        for harmless in [
            "// use crate::a::A;\n/* crate::a::A /* */ crate::a::A */",
            "const C: &str = \"crate::a::A\"; const D: &str = r#\"use crate::a::A; \"#;",
            "#[cfg(test)] mod tests { use crate::a::A; }",
            "#[cfg(test)] #[path = \"x.rs\"] mod tests;\n#[cfg(test)] use crate::a::A;",
            "use crate::a; use x::x; fn g() -> impl A + use<'_> { x::a::A; ::a::A; T::a::A }",
        ] {
            assert_eq!(found(&[ROOT, A, B, ("c.rs", harmless)]), [""; 0], "{harmless}");
        }
    }

    #[test]
    fn a_module_may_use_its_descendants_and_ancestors() {
        let mut files = vec![
            ("main.rs", "mod a; fn f() { a::b::g() }"),
            ("a.rs", "mod b; mod c; pub use self::b::g;"),
            ("a/b.rs", "use crate::f; use super::c; pub fn g() {}"),
            ("a/c/mod.rs", "mod d;"),
            ("a/c/d.rs", "use super::super::h;"),
        ];
        assert_eq!(found(&files), [""; 0]);
        // The parent only re-exports the function.
        files[2].1 = "use super::c::i;";
        files[3].1 = "mod d; fn i() { super::g() }";
        assert_eq!(found(&files), ["a/b.rs a/c/mod.rs"]);
    }
}
