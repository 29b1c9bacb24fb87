//! A new file in `migrations/` must recompile the crate, into which all of them are built.
fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
