set local lock_timeout = '500ms';

-- JSON Schema of what a model gives a tool on http_request, which its bindings name as {{name}} (L-3).
alter table configured_tools add column parameters jsonb;
