set local lock_timeout = '500ms';

alter table configured_tools drop column parameters;
