set local lock_timeout = '500ms';

alter table steps drop column failure_code;
