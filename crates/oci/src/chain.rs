//! Chain IDs: names of the tree of an image's first layers, whatever their compression.
//!
//! ```text
//!   diff IDs     d1            d2                      d3
//!   chain IDs    c1 = d1       c2 = sha256("c1 d2")    c3 = sha256("c2 d3")
//! ```

use burgeon_source::registry::OciDigest;

/// The chain ID of the layers up to each one; `None` from the first layer without a diff ID on.
pub(crate) fn chain_ids(diff_ids: &[Option<OciDigest>]) -> Vec<Option<OciDigest>> {
    let mut below: Option<OciDigest> = None;
    let chain = |(number, diff_id): (usize, &Option<OciDigest>)| {
        let diff_id = diff_id.as_ref();
        below = match (number, &below) {
            (0, _) => diff_id.cloned(),
            (_, Some(below)) => diff_id.map(|id| OciDigest::of(format!("{below} {id}").as_bytes())),
            (_, None) => None,
        };
        below.clone()
    };
    diff_ids.iter().enumerate().map(chain).collect()
}

#[cfg(test)]
mod tests {
    use burgeon_source::registry::OciDigest;

    use super::chain_ids;

    /// The identities of the specification: ChainID(L0) = DiffID(L0), and
    /// ChainID(L0|…|Ln) = Digest(ChainID(L0|…|Ln-1) + " " + DiffID(Ln)).
    #[test]
    fn a_chain_id_is_the_digest_of_the_chain_below_and_the_diff_id() {
        let [a, b, c] = [b"a", b"b", b"c"].map(|layer| OciDigest::of(layer));
        let two = OciDigest::of(format!("{a} {b}").as_bytes());
        let three = OciDigest::of(format!("{two} {c}").as_bytes());
        let ids = [Some(a.clone()), Some(b.clone()), Some(c.clone())];
        assert_eq!(chain_ids(&ids), [Some(a.clone()), Some(two), Some(three)]);
        // As `printf '%s %s' "$a" "$b" | sha256sum` prints it.
        let known = "sha256:51c0c8ace48498d6f5fee6b0592cc06f2da0f3cbe09c5a34a97dce85c3889676";
        assert_eq!(chain_ids(&ids[..2])[1].as_ref().unwrap().to_string(), known);
        assert_eq!(chain_ids(&[Some(a.clone()), None, Some(c)]), [Some(a), None, None]);
        assert!(chain_ids(&[]).is_empty());
    }
}
