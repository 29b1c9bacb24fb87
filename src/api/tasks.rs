//! Tasks: one, many, the feed, the tree, stop (T-20, T-21, T-23, T-24, T-30).

use super::App;
use super::auth::Caller;
use super::budget::BudgetView;
use super::cursor::Cursor;
use super::error::Error;
use super::extract::{FromQuery, Json, Path, Query, QueryReader};
use super::feed::{self, FeedItem};
use crate::domain::ids::{AgentId, BatchRunId, TaskId};
use crate::domain::task::TaskStatus;
use crate::lifecycle;
use crate::store::budgets;
use crate::store::task_trees::{self, TreeNode};
use crate::store::task_views::{
    self, After, Order, ParentRef, Sort, TaskDetails, TaskFilter, TaskSummary, UsageTotals,
};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const PAGE_MAX: u32 = 200;
const FEED_PAGE: u32 = 100;
const LIST_PAGE: u32 = 50;
/// A larger tree is cut, and says so.
const TREE_MAX: usize = 20_000;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(query_tasks))
        .routes(routes!(get_task))
        .routes(routes!(get_feed))
        .routes(routes!(get_tree))
        .routes(routes!(stop_task))
}

#[derive(Serialize, ToSchema)]
pub struct Task {
    #[serde(flatten)]
    summary: TaskSummary,
    #[serde(flatten)]
    details: TaskDetails,
    /// The task's own, for all that is beneath it; one that it is under is shown by the task above.
    budget: Option<BudgetView>,
}

/// See a task
#[utoipa::path(
    get,
    path = "/api/tasks/{id}",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path)),
    responses((status = 200, body = Task))
)]
async fn get_task(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
) -> Result<Json<Task>, Error> {
    let summary = task_views::summary(&app.pool, caller.workspace, id)
        .await?
        .ok_or(Error::NotFound)?;
    let details = task_views::details(&app.pool, caller.workspace, &[id])
        .await?
        .remove(&id)
        .ok_or(Error::NotFound)?;
    let budget = match details.budgeted {
        true => budgets::uses(&app.pool, caller.workspace, &[id.0])
            .await?
            .remove(&id.0),
        false => None,
    };
    Ok(Json(Task {
        summary,
        details,
        budget: budget.map(BudgetView::from),
    }))
}

#[derive(Serialize, ToSchema)]
pub struct Feed {
    items: Vec<FeedItem>,
    /// `after` of the next page; null when this was the last one for now.
    next_after: Option<i64>,
    /// Of the task, now.
    status: TaskStatus,
    /// The task that delegated this one, if one did.
    parent: Option<ParentRef>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "the document's side of `FeedQuery`")]
struct FeedParams {
    /// Items with a greater `seq`. Default 0.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// 1 to 200, default 100.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
}

struct FeedQuery {
    after: i64,
    limit: u32,
}

impl FromQuery for FeedQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        let after = query
            .optional("after", "a whole number, 0 or more")
            .unwrap_or(0u32.into());
        if after < 0 {
            query.refuse("after", "must be a whole number, 0 or more");
        }
        Self {
            after,
            limit: query.limit(FEED_PAGE, PAGE_MAX),
        }
    }
}

/// Read a task's feed
///
/// Everything that has happened in the task, in `seq` order. Calls, delegation cards and waits are shown as they stand now.
#[utoipa::path(
    get,
    path = "/api/tasks/{id}/feed",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path), FeedParams),
    responses((status = 200, body = Feed))
)]
async fn get_feed(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
    Query(query): Query<FeedQuery>,
) -> Result<Json<Feed>, Error> {
    let task = task_views::summary(&app.pool, caller.workspace, id)
        .await?
        .ok_or(Error::NotFound)?;
    let limit = query.limit as usize;
    let mut items = feed::load(
        &app.pool,
        caller.workspace,
        id,
        query.after,
        limit as i64 + 1,
    )
    .await?;
    let more = items.len() > limit;
    items.truncate(limit);
    let next_after = items.last().filter(|_| more).map(|item| item.seq);
    Ok(Json(Feed {
        items,
        next_after,
        status: task.status,
        parent: task.parent,
    }))
}

#[derive(Serialize, ToSchema)]
pub struct TaskPage {
    items: Vec<TaskRow>,
    /// `cursor` of the next page; null on the last one.
    next_cursor: Option<String>,
}

/// A row of a list; the details only with `view=enriched`.
#[derive(Serialize, ToSchema)]
pub struct TaskRow {
    #[serde(flatten)]
    summary: TaskSummary,
    #[serde(flatten)]
    details: Option<TaskDetails>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query, rename_all = "camelCase")]
#[allow(dead_code, reason = "the document's side of `TaskQuery`")]
struct TaskParams {
    /// Only the children of this task.
    parent_task_id: Option<TaskId>,
    /// Only the tasks of this batch run.
    batch_run_id: Option<BatchRunId>,
    /// May be repeated: any of these.
    status: Option<Vec<TaskStatus>>,
    /// `chat` or `spawned`.
    source: Option<String>,
    agent_group_id: Option<AgentId>,
    /// Part of the title, or a whole task id.
    q: Option<String>,
    /// `false` leaves out child tasks. Default `true`.
    include_spawned: Option<bool>,
    /// `-created_at` (default), `created_at`, `title` or `-title`.
    sort: Option<String>,
    /// `next_cursor` of the page before. Keep the other parameters as they were.
    cursor: Option<String>,
    /// 1 to 200, default 50.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `simple` (default), or `enriched` for rows with everything that `GET /api/tasks/{id}` shows.
    view: Option<String>,
}

struct TaskQuery {
    filter: TaskFilter,
    enriched: bool,
}

impl FromQuery for TaskQuery {
    fn from_query(query: &mut QueryReader) -> Self {
        const ID: &str = "an id";
        let sort =
            query.optional::<SortName>("sort", "one of -created_at, created_at, -title, title");
        let sort = sort.map_or(
            Sort {
                by: Order::Created,
                descending: true,
            },
            |name| name.0,
        );
        let after = query.optional::<String>("cursor", "").and_then(|text| {
            let cursor = Cursor::decode(&text, list_name(sort));
            if cursor.is_none() {
                query.refuse(
                    "cursor",
                    "is not a next_cursor of this list in this order; start again without it",
                );
            }
            cursor
        });
        let text = query.optional::<String>("q", "text");
        if text
            .as_ref()
            .is_some_and(|text| text.contains('\0') || text.chars().count() > 200)
        {
            query.refuse("q", "must have at most 200 characters and no NUL");
        }
        let source = query.optional::<Source>("source", "chat or spawned");
        let view = query.optional::<View>("view", "simple or enriched");
        let statuses = "one of pending, running, waiting_for_input, completed, failed, stopped";
        let filter = TaskFilter {
            parent: query.optional("parentTaskId", ID),
            batch_run: query.optional("batchRunId", ID),
            statuses: query.many("status", statuses),
            source: source.map(|source| source.0),
            agent: query.optional("agentGroupId", ID),
            text,
            include_spawned: query
                .optional("includeSpawned", "true or false")
                .unwrap_or(true),
            sort,
            after: after.map(|cursor| After {
                key: cursor.key,
                id: TaskId(cursor.id),
            }),
            limit: query.limit(LIST_PAGE, PAGE_MAX).into(),
        };
        Self {
            filter,
            enriched: view.is_some_and(|view| view.0),
        }
    }
}

struct SortName(Sort);

impl FromStr for SortName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (name, descending) = match text.strip_prefix('-') {
            Some(name) => (name, true),
            None => (text, false),
        };
        match name {
            "created_at" => Ok(Self(Sort {
                by: Order::Created,
                descending,
            })),
            "title" => Ok(Self(Sort {
                by: Order::Title,
                descending,
            })),
            _ => Err(()),
        }
    }
}

fn list_name(sort: Sort) -> &'static str {
    match (sort.by, sort.descending) {
        (Order::Created, true) => "tasks-created-desc",
        (Order::Created, false) => "tasks-created-asc",
        (Order::Title, true) => "tasks-title-desc",
        (Order::Title, false) => "tasks-title-asc",
    }
}

struct Source(&'static str);

impl FromStr for Source {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "chat" => Ok(Self("chat")),
            "spawned" => Ok(Self("spawned")),
            _ => Err(()),
        }
    }
}

/// Whether the view is the enriched one.
struct View(bool);

impl FromStr for View {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "simple" => Ok(Self(false)),
            "enriched" => Ok(Self(true)),
            _ => Err(()),
        }
    }
}

/// List tasks
///
/// Filters only narrow the caller's workspace. Pages stay correct while tasks are added: none is repeated, none skipped.
#[utoipa::path(
    get,
    path = "/api/tasks/query",
    tag = "tasks",
    security(("bearer" = [])),
    params(TaskParams),
    responses((status = 200, body = TaskPage))
)]
async fn query_tasks(
    State(app): State<App>,
    caller: Caller,
    Query(TaskQuery {
        mut filter,
        enriched,
    }): Query<TaskQuery>,
) -> Result<Json<TaskPage>, Error> {
    let limit = filter.limit as usize;
    filter.limit += 1;
    let mut tasks = task_views::list(&app.pool, caller.workspace, &filter).await?;
    let more = tasks.len() > limit;
    tasks.truncate(limit);
    let next_cursor = tasks.last().filter(|_| more).map(|last| {
        let key = match filter.sort.by {
            Order::Created => String::new(),
            Order::Title => last.title.clone(),
        };
        Cursor {
            list: list_name(filter.sort).to_owned(),
            id: last.id.0,
            key,
        }
        .encode()
    });
    let ids: Vec<TaskId> = tasks.iter().map(|task| task.id).collect();
    let mut details = match enriched {
        true => task_views::details(&app.pool, caller.workspace, &ids).await?,
        false => Default::default(),
    };
    let items = tasks.into_iter().map(|summary| TaskRow {
        details: details.remove(&summary.id),
        summary,
    });
    Ok(Json(TaskPage {
        items: items.collect(),
        next_cursor,
    }))
}

#[derive(Serialize, ToSchema)]
pub struct Tree {
    /// The task itself (depth 0) and its descendants, parents before children.
    items: Vec<TreeNode>,
    /// Of all of them.
    usage: UsageTotals,
    /// There are more tasks than the 20,000 shown.
    truncated: bool,
}

/// See a task's whole tree
#[utoipa::path(
    get,
    path = "/api/tasks/{id}/tree",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path)),
    responses((status = 200, body = Tree))
)]
async fn get_tree(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
) -> Result<Json<Tree>, Error> {
    let mut items = task_trees::tree(&app.pool, caller.workspace, id, TREE_MAX as i64 + 1).await?;
    if items.is_empty() {
        return Err(Error::NotFound);
    }
    let truncated = items.len() > TREE_MAX;
    items.truncate(TREE_MAX);
    let mut usage = UsageTotals::default();
    items.iter().for_each(|node| usage.add(&node.usage));
    Ok(Json(Tree {
        items,
        usage,
        truncated,
    }))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stop {
    /// Also stop every active descendant.
    #[serde(default)]
    include_subtasks: bool,
}

#[derive(Serialize, ToSchema)]
pub struct StopReceipt {
    task_id: TaskId,
    /// Of the task, now: `stopped`, or how it had ended before.
    status: TaskStatus,
    /// Tasks that this call stopped.
    stopped: u32,
    /// Tasks of the stopped tree that still live: always 0.
    left_alive: u32,
}

/// Stop a task
///
/// Calling it again changes nothing. A task that had already ended keeps its end; its active descendants are stopped
/// all the same when asked for.
#[utoipa::path(
    post,
    path = "/api/tasks/{id}/stop",
    tag = "tasks",
    security(("bearer" = [])),
    params(("id" = TaskId, Path)),
    request_body = Option<Stop>,
    responses((status = 200, body = StopReceipt))
)]
async fn stop_task(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<TaskId>,
    body: Option<Json<Stop>>,
) -> Result<Json<StopReceipt>, Error> {
    let stop = body.map(|Json(stop)| stop).unwrap_or_default();
    let receipt = lifecycle::stop::stop(
        &app.pool,
        &app.hub,
        caller.workspace,
        id,
        stop.include_subtasks,
    )
    .await?;
    let receipt = receipt.ok_or(Error::NotFound)?;
    Ok(Json(StopReceipt {
        task_id: id,
        status: receipt.status,
        stopped: receipt.stopped,
        left_alive: receipt.left_alive,
    }))
}
