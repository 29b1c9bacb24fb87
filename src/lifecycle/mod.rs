//! The use cases that change a task: one verb per file, one transaction each.
//!
//! **Locking order**, kept by every transaction (W-8): tasks (parents before children), await groups, awaits, then
//! signals and events. Locks are `for no key update`, since an insert that references a row takes a key-share lock on
//! it. A lock is taken in a statement of its own and only the locked rows are read with it: other rows would be seen as
//! they were before the wait. Every write repeats its guard even under a lock.

pub mod stop;
pub mod submit;
