//! The runtime flags as this process knows them: read from the database when the last reading is a second old (P-7).
//!
//! A reading that fails is an error for whoever asked, even where an older one is at hand: a switch that can not be read
//! must not look like one that was (S-1).

use crate::domain::flag::FlagValues;
use crate::store;
use sqlx::PgPool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One per process. Ask once per round or request, and pass the values on.
pub struct Flags {
    pool: PgPool,
    last: Mutex<Option<(Instant, Arc<FlagValues>)>>,
}

impl Flags {
    /// Half of what P-7 admits.
    pub const AGE_MAX: Duration = Duration::from_secs(1);

    pub fn new(pool: PgPool) -> Self {
        Self {
            pool,
            last: Mutex::default(),
        }
    }

    /// The flags as they were at most [`Self::AGE_MAX`] before `now`.
    pub async fn read(&self, now: Instant) -> Result<Arc<FlagValues>, store::Error> {
        if let Some((at, values)) = &*self.last.lock().unwrap_or_else(PoisonError::into_inner)
            && now.saturating_duration_since(*at) < Self::AGE_MAX
        {
            return Ok(values.clone());
        }
        let values = Arc::new(store::flags::values(&self.pool).await?);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Somebody who asked later may have been answered earlier.
        if last.as_ref().is_none_or(|(at, _)| *at <= now) {
            *last = Some((now, values.clone()));
        }
        Ok(values)
    }
}
