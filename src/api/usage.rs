//! What the workspace's model calls have taken (T-17).

use super::App;
use super::auth::Caller;
use super::cursor::Cursor;
use super::error::{Error, FieldError};
use super::extract::{FromQuery, Json, Query, QueryReader};
use crate::store;
use crate::store::task_views::UsageTotals;
use crate::store::usage::{self, Group, UsageFilter, UsageRow};
use axum::extract::State;
use chrono::{DateTime, NaiveDate, NaiveTime, Utc};
use serde::Serialize;
use std::str::FromStr;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

const PAGE: u32 = 100;
const PAGE_MAX: u32 = 1000;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_usage))
}

#[derive(Serialize, ToSchema)]
pub struct UsagePage {
    items: Vec<UsageView>,
    /// `cursor` of the next page; null on the last one.
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct UsageView {
    /// The id of the workspace, of the agent or of the task at the top, or the day (UTC). Null: all deleted tasks together.
    #[schema(example = "2026-11-30")]
    key: Option<String>,
    /// The agent's name or the task's title.
    name: Option<String>,
    usage: UsageTotals,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `UsageQuery`")]
struct UsageParams {
    /// `workspace` (default), `agent`, `task_tree` or `day`.
    #[param(example = "day")]
    group_by: Option<String>,
    /// Steps that ended at or after this: a day (UTC), or a time as in RFC 3339.
    #[param(example = "2026-11-01")]
    from: Option<String>,
    /// Steps that ended before this.
    #[param(example = "2026-12-01T00:00:00Z")]
    to: Option<String>,
    /// `next_cursor` of the page before. Keep the other parameters as they were.
    cursor: Option<String>,
    /// 1 to 1000, default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

struct UsageQuery {
    group: Group,
    from: Option<DateTime<Utc>>,
    to: Option<DateTime<Utc>>,
    cursor: Option<String>,
    limit: u32,
}

impl FromQuery for UsageQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        const TIME: &str = "a day such as 2026-11-30, or a time such as 2026-11-30T12:00:00Z";
        let group =
            query.optional::<GroupName>("group_by", "one of workspace, agent, task_tree, day");
        let from = query.optional::<Moment>("from", TIME).map(|m| m.0);
        let to = query.optional::<Moment>("to", TIME).map(|m| m.0);
        if from.zip(to).is_some_and(|(from, to)| from >= to) {
            query.refuse("to", "must be later than `from`");
        }
        Self {
            group: group.map_or(Group::Workspace, |name| name.0),
            from,
            to,
            cursor: query.optional("cursor", "text"),
            limit: query.limit(PAGE, PAGE_MAX),
        }
    }
}

struct GroupName(Group);

impl FromStr for GroupName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let found = Group::ALL.into_iter().find(|group| group.as_str() == text);
        found.map(Self).ok_or(())
    }
}

struct Moment(DateTime<Utc>);

impl FromStr for Moment {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        // What the database can hold, with room to spare.
        let day = |text: &str| {
            let day: NaiveDate = text.parse().ok()?;
            Some(day.and_time(NaiveTime::MIN).and_utc())
        };
        let time = |text: &str| DateTime::parse_from_rfc3339(text).ok().map(|t| t.to_utc());
        let found = day(text).or_else(|| time(text)).filter(|t| {
            let year = chrono::Datelike::year(t);
            (1..=9999).contains(&year)
        });
        found.map(Self).ok_or(())
    }
}

/// Sum up usage
///
/// Tokens, cost and time of the workspace's decide steps, failed ones included. A child's steps are its own; a call that
/// delegates takes nothing. Cost is null where no model of the group has a price (`llm.prices`). Not known here: answers
/// that a provider bills and nobody keeps, since their worker was lost or their task stopped.
#[utoipa::path(
    get,
    path = "/api/usage",
    tag = "tasks",
    security(("bearer" = [])),
    params(UsageParams),
    responses((status = 200, body = UsagePage))
)]
async fn get_usage(
    State(app): State<App>,
    caller: Caller,
    Query(query): Query<UsageQuery>,
) -> Result<Json<UsagePage>, Error> {
    let list = format!("usage-{}", query.group.as_str());
    let after = match &query.cursor {
        None => None,
        Some(text) => Some(Cursor::decode(text, &list).ok_or_else(|| {
            let reason = "must be the next_cursor of another page of this list";
            Error::InvalidQuery(vec![FieldError::new("cursor", reason)])
        })?),
    };
    let limit = query.limit as usize;
    let filter = UsageFilter {
        group: query.group,
        from: query.from,
        to: query.to,
        after: after.map(|cursor| cursor.key),
        limit: limit as i64 + 1,
    };
    let mut conn = app.pool.acquire().await.map_err(store::Error::from)?;
    let mut rows = usage::sums(&mut conn, caller.workspace, &filter).await?;
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next_cursor = rows.last().filter(|_| more).map(|last| {
        let cursor = Cursor {
            list,
            id: Uuid::nil(),
            key: last.key.clone(),
        };
        cursor.encode()
    });
    Ok(Json(UsagePage {
        items: rows.into_iter().map(UsageView::from).collect(),
        next_cursor,
    }))
}

impl From<UsageRow> for UsageView {
    fn from(row: UsageRow) -> Self {
        Self {
            key: Some(row.key).filter(|key| !key.is_empty()),
            name: row.label,
            usage: row.usage,
        }
    }
}
